"""What every KV connector does when nothing goes wrong, and on misuse by its owner."""

from __future__ import annotations

import dataclasses
import queue
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from kv_transfer.connector.connector_parts import ConnectorParts
from kv_transfer.connector.receiving_end import ReceivingEnd
from kv_transfer.contract import (
    ConnectorEvent,
    ConnectorFailed,
    Landed,
    Released,
    TransferEnded,
)
from kv_transfer.zmq.endpoints import parse_tcp
from tests.support.kv.kinds import NodeOptions
from tests.support.kv.kv_cluster import (
    LAYOUT,
    PAIR_BYTES,
    WINDOW_BYTES,
    Cluster,
    assert_ended_once,
    commit_for,
    error_of,
    send,
)


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[list[int], list[int], int, list[tuple[int, list[int]]], int]:
    """(source blocks, target blocks, cached blocks, pushes in any order and split, tail gap)."""
    count = draw(st.integers(1, 8))
    blocks = st.lists(st.integers(0, 11), min_size=count, max_size=count, unique=True)
    pieces = draw(st.permutations([(layer, o) for layer in range(3) for o in range(count)]))
    pushes: list[tuple[int, list[int]]] = []
    for layer, ordinal in pieces:
        joins = pushes and pushes[-1][0] == layer and draw(st.booleans())
        if joins:
            pushes[-1][1].append(ordinal)
        else:
            pushes.append((layer, [ordinal]))
    return draw(blocks), draw(blocks), draw(st.integers(0, 2)), pushes, draw(st.integers(0, 3))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_keys_and_values_in_few_bits_arrive_with_their_scales(cluster: Cluster, dtype: str) -> None:
    """Pieces are of other sizes, and every byte of theirs is sent and summed."""
    layout = dataclasses.replace(LAYOUT, head_dim=64, block_size=16, dtype=dtype)
    assert layout.piece_bytes == 2 * 16 * {"bfloat16": 128, "int8": 68}[dtype]
    prefill, decode = (cluster.node(name, layout=layout, window_bytes=1 << 16) for name in "pd")
    ticket = cluster.ticket(decode, [7, 2, 9])
    wanted = decode.pool.copy()
    wanted[:, :, [7, 2, 9]] = prefill.pool[:, :, [4, 5, 1]]
    commit = commit_for(ticket, layout)
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, [4, 5, 1], layers=[0, 1, 2])
    prefill.connector.commit(ticket.lease_token, commit)
    assert decode.wait_event() == Landed(ticket.lease_token, commit)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool, wanted)


@pytest.mark.covers("F23", "F41", "F42", "F43")
def test_bytes_arrive_equal_and_nothing_else_changes(cluster: Cluster) -> None:
    """Any blocks, any order, any split, any cached prefix, any tail."""
    prefill, decode = cluster.node("p"), cluster.node("d")

    @settings(max_examples=40, deadline=None)
    @given(handoffs())
    def check(
        handoff: tuple[list[int], list[int], int, list[tuple[int, list[int]]], int],
    ) -> None:
        sources, targets, cached_blocks, pushes, missing = handoff
        ticket = cluster.ticket(decode, targets, num_cached_tokens=cached_blocks * 4)
        commit = commit_for(ticket, missing=missing)
        wanted = decode.pool.copy()
        wanted[:, :, targets] = prefill.pool[:, :, sources]

        decode.connector.expect(ticket, sender_deadline_s=30)
        prefill.connector.open(ticket, deadline_s=30)
        for layer, ordinals in pushes:
            prefill.connector.push(
                ticket.lease_token,
                layer=layer,
                ordinals=ordinals,
                source_blocks=[sources[ordinal] for ordinal in ordinals],
            )
        prefill.connector.commit(ticket.lease_token, commit)
        assert decode.wait_event() == Landed(ticket.lease_token, commit)
        assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
        assert np.array_equal(decode.pool, wanted)

    check()
    for node in (prefill, decode):
        statistics = node.connector.statistics()
        assert (statistics.transfers_open, statistics.landings_open) == (0, 0)
        assert not any(statistics.frames_dropped.values())


def test_the_first_blocks_of_a_ticket_land_alone_where_it_allows_that(cluster: Cluster) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    for may_be_short in (True, False):
        whole = cluster.ticket(decode, [7, 2, 9], num_cached_tokens=4)
        ticket = dataclasses.replace(whole, may_be_short=may_be_short)
        wanted = decode.pool.copy()
        wanted[:, :, [7, 2]] = prefill.pool[:, :, [4, 5]]
        commit = dataclasses.replace(commit_for(ticket), num_tokens=4 + 2 * LAYOUT.block_size)
        decode.connector.expect(ticket, sender_deadline_s=30)
        prefill.connector.open(ticket, deadline_s=30)
        for layer in range(LAYOUT.num_layers):
            prefill.connector.push(
                ticket.lease_token, layer=layer, ordinals=[0, 1], source_blocks=[4, 5]
            )
        prefill.connector.commit(ticket.lease_token, commit)
        if may_be_short:
            assert decode.wait_event() == Landed(ticket.lease_token, commit)
            assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
            assert np.array_equal(decode.pool, wanted)
        else:
            assert "short count" in str(error_of(decode.wait_event()))
            assert isinstance(decode.wait_event(), Released)
            assert error_of(prefill.wait_event())
    assert_ended_once(prefill, decode)


def test_many_handoffs_share_one_window(cluster: Cluster) -> None:
    """Two prefill nodes, six handoffs each, all open at once; each block has its own content."""
    prefills = [cluster.node("p0", num_blocks=6), cluster.node("p1", num_blocks=6)]
    decode = cluster.node("d", num_blocks=36)
    wanted = decode.pool.copy()
    tickets = []
    for index in range(12):
        ticket = cluster.ticket(decode, [3 * index + 2, 3 * index, 3 * index + 1])
        sources = [(index + n) % 6 for n in range(3)]
        prefill = prefills[index % 2]
        wanted[:, :, list(ticket.target_block_ids)] = prefill.pool[:, :, sources]
        decode.connector.expect(ticket, sender_deadline_s=30)
        prefill.connector.open(ticket, deadline_s=30)
        tickets.append((prefill, ticket, sources))
    for layer in reversed(range(LAYOUT.num_layers)):
        for prefill, ticket, sources in tickets:
            prefill.push_all(ticket, sources, layers=[layer])
    for prefill, ticket, _ in tickets:
        prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    landed = {decode.wait_event().lease_token for _ in tickets}
    assert landed == {ticket.lease_token for _, ticket, _ in tickets}
    ends = [prefill.wait_event() for prefill in prefills for _ in range(6)]
    assert all(isinstance(end, TransferEnded) and end.error is None for end in ends)
    assert np.array_equal(decode.pool, wanted)


def test_a_piece_pushed_twice_is_sent_once(cluster: Cluster) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(decode, [1, 2])
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, [4, 5])
    prefill.push_all(ticket, [4, 5])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert prefill.connector.statistics().bytes_sent == 2 * LAYOUT.block_bytes


def test_one_connector_sends_to_itself(cluster: Cluster) -> None:
    """A mixed node may hand over to itself: neither side waits for the other."""
    node = cluster.node("m")
    ticket = cluster.ticket(node, [0, 1])
    node.connector.expect(ticket, sender_deadline_s=30)
    node.connector.open(ticket, deadline_s=30)
    node.push_all(ticket, [8, 9])
    node.connector.commit(ticket.lease_token, commit_for(ticket))
    events = {type(node.wait_event()), type(node.wait_event())}
    assert events == {Landed, TransferEnded}
    assert np.array_equal(node.pool[:, :, [0, 1]], node.pool[:, :, [8, 9]])


def test_on_event_may_call_the_connector_and_raise(cluster: Cluster) -> None:
    """The next handoff is expected inside `on_event`, and a callback that raises has no effect."""
    landed: queue.Queue[ConnectorEvent] = queue.Queue()
    expected = threading.Event()

    def on_event(event: ConnectorEvent) -> None:
        assert not isinstance(event, ConnectorFailed)
        decode.connector.revoke(event.lease_token)
        landed.put(event)
        if event.lease_token == first.lease_token:
            decode.connector.expect(second, sender_deadline_s=30)
            expected.set()
        raise RuntimeError("a bug of the owner")

    prefill = cluster.node("p")
    decode = cluster.node("d", on_event=on_event)
    first, second = cluster.ticket(decode, [0]), cluster.ticket(decode, [0])
    decode.connector.expect(first, sender_deadline_s=30)
    for ticket in (first, second):
        prefill.connector.open(ticket, deadline_s=30)
        prefill.push_all(ticket, [3])
        prefill.connector.commit(ticket.lease_token, commit_for(ticket))
        assert isinstance(landed.get(timeout=20), Landed)
        assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
        assert expected.wait(20)


def test_misuse_raises_and_changes_nothing(cluster: Cluster) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(decode, [1, 2])
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    other = cluster.ticket(decode, [2, 3])
    refused_tickets = [
        ticket,
        other,
        dataclasses.replace(other, target_block_ids=()),
        dataclasses.replace(other, target_block_ids=(5, 5)),
        dataclasses.replace(other, target_block_ids=(12,)),
        dataclasses.replace(other, target_block_ids=(5,), fingerprint="other"),
        dataclasses.replace(other, target_block_ids=(5,), decode_node=prefill.incarnation),
    ]
    for refused in refused_tickets:
        with pytest.raises(ValueError, match=r"lease|block"):
            decode.connector.expect(refused, sender_deadline_s=30)
    with pytest.raises(ValueError, match="open already"):
        prefill.connector.open(ticket, deadline_s=30)
    with pytest.raises(ValueError, match="no target block"):
        prefill.connector.open(dataclasses.replace(other, target_block_ids=()), deadline_s=30)
    prefill.push_all(ticket, [4, 5])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    with pytest.raises(ValueError, match="was open"):
        decode.connector.expect(ticket, sender_deadline_s=30)


@pytest.mark.parametrize(
    ("layer", "ordinals", "blocks", "wrong"),
    [
        (3, [0], [0], "layer 3"),
        (-1, [0], [0], "layer -1"),
        (0, [0, 2], [0, 1], "ordinal 2"),
        (0, [-1], [0], "ordinal -1"),
        (0, [0, 1], [0, 12], "source block 12"),
        (0, [0], [-1], "source block -1"),
        (0, [0, 1], [0], "2 ordinals for 1 source blocks"),
    ],
)
def test_a_push_that_is_misuse_fails_its_transfer_alone(
    cluster: Cluster, layer: int, ordinals: list[int], blocks: list[int], wrong: str
) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    # The connection stands then, so the decode node is told at once.
    send(prefill, decode, first := cluster.ticket(decode, [1]), [4])
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(first.lease_token, None)
    misused, good = cluster.ticket(decode, [1, 2]), cluster.ticket(decode, [3, 4])
    for ticket in (misused, good):
        decode.connector.expect(ticket, sender_deadline_s=30)
        prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(good, [6, 7], layers=[0])
    prefill.connector.push(
        misused.lease_token, layer=layer, ordinals=ordinals, source_blocks=blocks
    )
    assert wrong in str(error_of(prefill.wait_event()))
    assert "aborted the transfer" in str(decode.wait_failed())
    prefill.push_all(good, [6, 7], layers=[1, 2])
    prefill.connector.commit(good.lease_token, commit_for(good))
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(good.lease_token, None)
    assert_ended_once(prefill, decode)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [("push", "push after commit"), ("commit", "committed twice"), ("drafts", "65 draft tokens")],
)
def test_nothing_more_after_commit(cluster: Cluster, change: str, wrong: str) -> None:
    """The decode node does not answer, so nothing is sent, and the error is told all the same."""
    prefill = cluster.node("p")
    ticket = dataclasses.replace(
        cluster.ticket(cluster.node("d"), [1, 2]), kv_endpoint=cluster.silent_endpoint()
    )
    prefill.connector.open(ticket, deadline_s=30)
    drafts = tuple(range(65 if change == "drafts" else 64))
    commit = dataclasses.replace(commit_for(ticket), draft_token_ids=drafts)
    prefill.connector.commit(ticket.lease_token, commit)
    if change == "push":
        prefill.push_all(ticket, [1, 2], layers=[0])
    elif change == "commit":
        prefill.connector.commit(ticket.lease_token, commit)
    assert wrong in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill)


@pytest.mark.covers("F52")
def test_unknown_tokens_are_ignored(cluster: Cluster) -> None:
    node = cluster.node("p")
    node.connector.revoke(5)
    node.connector.abort(5)
    node.connector.push(5, layer=0, ordinals=[0], source_blocks=[0])
    node.connector.commit(5, commit_for(cluster.ticket(node, [0])))
    node.connector.close()
    assert node.events == []


@pytest.mark.parametrize(
    ("layout", "window_bytes", "error"),
    [
        (dataclasses.replace(LAYOUT, num_layers=4), WINDOW_BYTES, ValueError),
        (dataclasses.replace(LAYOUT, head_dim=4), WINDOW_BYTES, ValueError),
        (LAYOUT, PAIR_BYTES // 4 - 1, ConfigError),  # of each of up to four connections
    ],
)
def test_a_pool_or_window_that_does_not_fit(
    cluster: Cluster, layout: KVLayout, window_bytes: int, error: type[Exception]
) -> None:
    node = cluster.node("p")
    options = NodeOptions(
        layout=layout,
        incarnation=node.incarnation,
        window_bytes=window_bytes,
        peer_timeout_s=2.0,
    )
    threads = set(threading.enumerate())
    with pytest.raises(error, match="wanted"):
        cluster.kind.connector(node.pool, options, lambda _: None)
    assert not kv_threads() - threads


def test_a_connector_that_cannot_be_made_leaves_no_thread_and_no_port(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.node("p")
    threads = set(threading.enumerate())

    def fail(self: ReceivingEnd, parts: ConnectorParts) -> None:
        raise ConfigError(f"not on {parts.transport.endpoint}")

    monkeypatch.setattr(ReceivingEnd, "__init__", fail)
    with pytest.raises(ConfigError) as failed:
        cluster.node("d")
    assert not kv_threads() - threads
    if cluster.lane == "zmq":
        host, port = parse_tcp(str(failed.value).removeprefix("not on "))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port)).close()
    assert node.connector.statistics().landings_open == 0


def test_a_connector_whose_thread_cannot_start_leaves_no_thread_and_no_port(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.node("p")
    threads, start = set(threading.enumerate()), threading.Thread.start
    endpoints: list[str] = []

    def cannot_start(thread: threading.Thread) -> None:
        if thread.name == "pdserve-kv":
            endpoints.append(thread._target.__self__.endpoint)  # type: ignore[attr-defined]
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    with pytest.raises(RuntimeError, match="new thread"):
        cluster.node("d")
    assert not kv_threads() - threads
    (endpoint,) = endpoints
    if cluster.lane == "zmq":
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(parse_tcp(endpoint)).close()
    assert node.connector.statistics().landings_open == 0


def kv_threads() -> set[threading.Thread]:
    """Return the threads of all connectors that are there."""
    return {one for one in threading.enumerate() if one.name.startswith("pdserve-kv")}
