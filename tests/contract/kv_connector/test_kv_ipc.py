"""Cases of pools on cards: a source that changes, dies or lies, a card that is slow or fails."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from common.errors import HandoffFailed
from kv_transfer.contract import Landed, LandingFailed, Released, Ticket, TransferEnded
from kv_transfer.lanes.ipc.ipc_lane import IpcLane
from kv_transfer.lanes.lane import OnPayload, Payload
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S
from kv_transfer.wire import frames
from tests.contract.kv_connector.killed_sender import killed_sender
from tests.contract.kv_connector.raw_sender import RawSender, assert_unknown_block_is_refused
from tests.support.clocks.manual_clock import ManualClock
from tests.support.engine.fake_card import FakeCard
from tests.support.kv.kinds import CardKind
from tests.support.kv.kv_cluster import (
    WAIT_S,
    Cluster,
    Node,
    assert_ended_once,
    begin,
    cluster_of,
    commit_for,
    error_of,
    send,
    wait_until,
)
from tests.support.kv.links import Link

TARGETS, SOURCES = (1, 2, 3), (4, 5, 6)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.closing(cluster_of("ipc")) as cluster:
        yield cluster
        _release(cluster)


@pytest.fixture(params=["ipc", "card-zmq"])
def any_lane(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with contextlib.closing(cluster_of(request.param)) as cluster:
        yield cluster
        _release(cluster)


def _release(cluster: Cluster) -> None:
    assert isinstance(cluster.kind, CardKind)
    for card in cluster.kind.cards.values():
        card.copier.release()


def card_of(cluster: Cluster, node: Node) -> FakeCard:
    assert isinstance(cluster.kind, CardKind)
    return cluster.kind.card(node.pool)


def held(cluster: Cluster, **options: Any) -> tuple[Node, Node, Ticket]:
    """Start a whole handoff whose first copy onto the decode node's card is held."""
    prefill, decode = (cluster.node(name, **options) for name in "pd")
    card_of(cluster, decode).copier.hold()
    ticket = cluster.ticket(decode, TARGETS)
    send(prefill, decode, ticket, SOURCES)
    card_of(cluster, decode).copier.wait_under_way(1)
    return prefill, decode, ticket


def assert_others_land(cluster: Cluster, decode: Node) -> None:
    other = cluster.node("other")
    again = cluster.ticket(decode, TARGETS)
    send(other, decode, again, [7, 8, 9])
    wait_until(lambda: any(event == Landed(again.lease_token, commit_for(again))
                           for event in decode.events))  # fmt: skip
    assert np.array_equal(decode.pool[:, :, TARGETS], other.pool[:, :, [7, 8, 9]])


@pytest.mark.parametrize("verify", ["block", "commit", "off"])
def test_nothing_lands_before_the_card_has_it(any_lane: Cluster, verify: str) -> None:
    cluster = any_lane
    prefill, decode, ticket = held(cluster, verify=verify)
    wanted = decode.pool.copy()
    wanted[:, :, TARGETS] = prefill.pool[:, :, SOURCES]
    copier = card_of(cluster, decode).copier
    for num_over in range(1, 100):
        assert decode.events == prefill.events == []
        copier.release(1)
        wait_until(lambda: copier.num_over == num_over)  # noqa: B023
        wait_until(lambda: copier.num_under_way or decode.events)
        if decode.events:
            break
    assert num_over >= 3
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket))
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool, wanted)
    assert_ended_once(prefill, decode)


@pytest.mark.parametrize("verify", ["block", "commit", "off"])
def test_a_frame_waits_until_its_layer_is_computed(
    any_lane: Cluster, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's card tells when, also where it makes no sums: till then steps write blocks."""
    prefill, decode = (any_lane.node(name, verify=verify) for name in "pd")
    source, target = (card_of(any_lane, node).copier for node in (prefill, decode))
    order: list[str] = []
    begin_source, begin_target = source.begin, target.begin

    def computed(work: Callable[[], None]) -> None:
        def run() -> None:
            order.append("computed")
            work()

        begin_source(run)

    def copied(work: Callable[[], None]) -> None:
        order.append("copied")
        begin_target(work)

    monkeypatch.setattr(source, "begin", computed)
    monkeypatch.setattr(target, "begin", copied)
    source.hold()
    ticket = any_lane.ticket(decode, TARGETS)
    send(prefill, decode, ticket, SOURCES)
    wait_until(lambda: source.num_under_way or order)
    for target_block in (5, 6):  # Two round trips: all that could be sent was sent and handled.
        other = any_lane.ticket(decode, [target_block])
        decode.connector.expect(other, sender_deadline_s=30)
        prefill.connector.open(other, deadline_s=30)
        prefill.connector.abort(other.lease_token)
        assert error_of(prefill.wait_event()).code == "handoff_failed"
        decode.wait_failed()
    assert not prefill.connector.statistics().measured.bytes_to.get("d")
    assert order == []
    prefill.pool[:, :, SOURCES] ^= 0xFF
    source.release()
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket))
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool[:, :, TARGETS], prefill.pool[:, :, SOURCES])
    assert order.count("copied") >= 3
    for end in range(len(order)):
        assert order[:end].count("computed") >= order[:end].count("copied")


def test_a_frame_is_sent_while_the_next_ones_are_prepared(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window has room for all. Those whose sums are known do not wait until it is full."""
    prefill, decode = (cluster.node(name) for name in "pd")
    are_pushed, is_first_summed = threading.Event(), threading.Event()
    numbers, sent_before = itertools.count(1), dict[int, int]()
    begin_payload = IpcLane.begin_payload

    def begun(lane: IpcLane, chunk: LayerChunk, on_payload: OnPayload, *, is_summed: bool) -> None:
        def told(payload: Payload | HandoffFailed) -> None:
            on_payload(payload)
            is_first_summed.set()

        number = next(numbers)
        assert number != 1 or are_pushed.wait(WAIT_S)
        assert number != 2 or is_first_summed.wait(WAIT_S)
        sent_before[number] = prefill.connector.statistics().bytes_sent
        begin_payload(lane, chunk, told, is_summed=is_summed)

    monkeypatch.setattr(IpcLane, "begin_payload", begun)
    ticket = cluster.ticket(decode, TARGETS)
    send(prefill, decode, ticket, SOURCES)
    are_pushed.set()
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket))
    assert sent_before[1] == sent_before[2] == 0 < sent_before[3]


@pytest.mark.covers("F14", "F56")
@pytest.mark.parametrize("how", ["revoke", "abort", "close"])
def test_blocks_are_held_until_the_card_writes_them_no_more(any_lane: Cluster, how: str) -> None:
    cluster = any_lane
    prefill, decode, ticket = held(cluster)
    if how == "revoke":
        decode.connector.revoke(ticket.lease_token)
    elif how == "abort":
        prefill.connector.abort(ticket.lease_token)
    else:
        prefill.connector.close()
    wait_until(lambda: decode.connector.statistics().blocks_quarantined == len(TARGETS))
    with pytest.raises(ValueError, match="target block 1 was not released yet"):
        decode.connector.expect(cluster.ticket(decode, TARGETS[:1]), sender_deadline_s=30)
    assert not any(isinstance(event, Released) for event in decode.events)
    card_of(cluster, decode).copier.release()
    wait_until(lambda: Released(ticket.lease_token) in decode.events)
    assert card_of(cluster, decode).copier.num_under_way == 0
    assert_others_land(cluster, decode)


@pytest.mark.covers("F13")
@pytest.mark.parametrize("verify", ["block", "off"])
def test_a_source_that_is_reused_after_its_transfer_ended_is_never_landed(
    cluster: Cluster, verify: str
) -> None:
    clock = ManualClock()
    prefill = cluster.node("p", verify=verify, clock=clock)
    decode = cluster.node("d", verify=verify)
    card_of(cluster, decode).copier.hold()
    ticket = cluster.ticket(decode, TARGETS)
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=0.5)
    prefill.push_all(ticket, SOURCES)
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    card_of(cluster, decode).copier.wait_under_way(1)
    prefill.pass_time_until(lambda: prefill.events, clock)
    assert "by the deadline" in str(error_of(prefill.wait_event()))
    prefill.pool[:, :, SOURCES] ^= 0xFF
    card_of(cluster, decode).copier.release()
    decode.wait_failed()
    assert not any(isinstance(event, Landed) for event in decode.events)
    assert_ended_once(prefill, decode)


@pytest.mark.parametrize("verify", ["block", "commit"])
@pytest.mark.parametrize("kind", [0, 1], ids=["keys", "values"])
def test_what_was_copied_is_what_is_verified(cluster: Cluster, verify: str, kind: int) -> None:
    """A source block changes between the sender's sum and the receiver's copy."""
    prefill, decode, _ = held(cluster, verify=verify)
    prefill.pool[0, kind, 4, 100] ^= 1
    card_of(cluster, decode).copier.release()
    assert "bad checksum" in str(decode.wait_failed())
    assert "bad checksum" in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill, decode)


def test_a_sum_names_its_place(cluster: Cluster) -> None:
    """Equal blocks at two places of a ticket, and in two layers, have different sums."""
    kind = cluster.kind
    planes = [np.full(64, 7, np.uint8)] * 2
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({kind.sums(planes, layer, ordinal) for layer, ordinal in places}) == len(places)


def test_only_the_first_copy_of_a_landing_waits_for_the_steps(cluster: Cluster) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    for targets in ([1, 2, 3], [5], [1, 2]):
        ticket = cluster.ticket(decode, targets)
        send(prefill, decode, ticket, targets)
        assert isinstance(decode.wait_event(), Landed)
    assert card_of(cluster, decode).num_behind_steps == 3


@pytest.mark.parametrize("is_at_once", [True, False])
def test_a_copy_that_fails_fails_its_landing(any_lane: Cluster, is_at_once: bool) -> None:
    cluster = any_lane
    prefill, decode = cluster.node("p"), cluster.node("d")
    card = card_of(cluster, decode)
    ticket = cluster.ticket(decode, TARGETS)
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    wait_until(lambda: decode.connector.statistics().sessions_open)
    if cluster.lane == "ipc":
        wait_until(lambda: card.opened)
    if is_at_once:
        card.fails = HandoffFailed("the card failed")
    else:
        card.copier.fails_next = True
    prefill.push_all(ticket, SOURCES)
    assert "the card failed" in str(decode.wait_failed())
    assert "the card failed" in str(error_of(prefill.wait_event()))
    card.fails = None
    assert_others_land(cluster, decode)


def test_a_sender_whose_card_fails_ends(any_lane: Cluster) -> None:
    """Every later step on that card fails too: its node has to end."""
    cluster = any_lane
    prefill, decode, ticket = begin(cluster)
    card_of(cluster, prefill).copier.fails_next = True
    prefill.push_all(ticket, SOURCES)
    assert "closed" in str(error_of(prefill.wait_event()))
    assert [str(error) for error, _ in prefill.failures] == ["the card failed"]
    assert isinstance(decode.wait_event(), LandingFailed)


@pytest.mark.parametrize("block", [4, 2**32 - 1])
def test_a_block_that_the_sender_does_not_have(cluster: Cluster, block: int) -> None:
    """It is refused before the card is asked, and its connection with it."""
    decode = cluster.node("d")
    assert_unknown_block_is_refused(cluster, decode, block)
    wait_until(lambda: all(one.is_closed for one in card_of(cluster, decode).opened))


LIES: dict[str, dict[int, object]] = {
    "another nonce": {1: b"n" * 16},
    "more than there is": {2: 1 << 40},
    "more blocks than bytes": {3: 1 << 20},
    "another version": {0: 9},
    "no number": {2: "many"},
    "no nonce": {1: b""},
}


@pytest.mark.parametrize("lie", list(LIES))
def test_an_offer_that_lies_is_passed_over_for_the_next_lane(
    cluster: Cluster, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = IpcLane.offer

    def changed(self: IpcLane, peer: Peer) -> bytes:
        fields = msgpack.unpackb(offer(self, peer))
        for place, value in LIES[lie].items():
            fields[place] = value
        packed: bytes = msgpack.packb(fields)
        return packed

    monkeypatch.setattr(IpcLane, "offer", changed)
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(decode, TARGETS)
    send(prefill, decode, ticket, SOURCES)
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool[:, :, TARGETS], prefill.pool[:, :, SOURCES])
    assert list(prefill.connector.statistics().lanes.values()) == ["zmq"]


def test_a_lane_that_changes_within_a_transfer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came from card to card stays, and the rest comes through the rings."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    port = int(decode.connector.endpoint.rpartition(":")[2])
    with contextlib.closing(Link(port)) as link:
        ticket = replace(cluster.ticket(decode, TARGETS), kv_endpoint=f"tcp://{link.address}")
        change_lane(cluster, prefill, decode, ticket, link, monkeypatch)


def change_lane(
    cluster: Cluster,
    prefill: Node,
    decode: Node,
    ticket: Ticket,
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, SOURCES, layers=[0])
    wait_until(lambda: prefill.connector.statistics().measured.bytes_to.get("d"))
    monkeypatch.setattr(IpcLane, "open", lambda *_: None)
    link.refuse()
    link.mend()
    wait_until(lambda: "zmq" in prefill.connector.statistics().lanes.values())
    prefill.push_all(ticket, SOURCES, layers=[1, 2])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool[:, :, TARGETS], prefill.pool[:, :, SOURCES])
    assert list(prefill.connector.statistics().lanes.values()) == ["zmq"]


@pytest.mark.covers("F25")
def test_a_sender_that_is_killed_while_its_pool_is_copied(cluster: Cluster) -> None:
    """The mapped memory stays readable; the landing fails typed; the memory is released."""
    clock = ManualClock()
    decode = cluster.node("d", clock=clock)
    card = card_of(cluster, decode)
    card.copier.hold()
    ticket = cluster.ticket(decode, TARGETS)
    decode.connector.expect(ticket, sender_deadline_s=60)
    with killed_sender(cluster, ticket, [4, 5, 6], layers=[0, 1]):
        card.copier.wait_under_way(1)
    decode.pass_time_until(lambda: decode.events, clock)
    assert f"was silent for {DEFAULT_PEER_TIMEOUT_S:g} s" in str(error_of(decode.wait_event()))
    assert not any(one.is_closed for one in card.opened)
    card.copier.release()
    assert decode.wait_event() == Released(ticket.lease_token)
    wait_until(lambda: all(one.is_closed for one in card.opened))
    assert_others_land(cluster, decode)


@pytest.mark.covers("F65")
def test_sessions_that_end_let_go_of_the_memory(cluster: Cluster) -> None:
    decode = cluster.node("d")
    card = card_of(cluster, decode)
    for count in range(1, 4):
        with contextlib.closing(RawSender(cluster, decode)) as rogue:
            rogue.settle()
            assert [one.is_closed for one in card.opened] == [True] * (count - 1) + [False]
            rogue.send(frames.Pong())  # Not for a sender to say: the session is over.
            assert isinstance(rogue.answer(), frames.Rejected)
        wait_until(lambda: card.opened[-1].is_closed)
    decode.connector.close()


def test_closing_waits_for_the_copies(any_lane: Cluster) -> None:
    cluster = any_lane
    _, decode, _ = held(cluster)
    copier = card_of(cluster, decode).copier
    closing = threading.Thread(target=decode.connector.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    copier.release()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert copier.num_under_way == 0
