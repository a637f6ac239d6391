"""Every way a handoff can end: one event per side, typed, and nothing written afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.errors import LayoutMismatch
from common.ids import Incarnation
from kv_transfer.connector.receiving_end import ReceivingEnd
from kv_transfer.connector.sending_end import SendingEnd
from kv_transfer.contract import Landed, Released, Revoked, TransferEnded
from kv_transfer.lanes import pieces
from kv_transfer.lanes.pieces import PieceRows
from kv_transfer.sending.effects import SendChunk
from kv_transfer.shared.limits import (
    BESIDE_WINDOWS,
    MAX_REPEATS_PER_LANDING,
    MAX_REPEATS_PER_PIECE,
)
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.kv_cluster import (
    LAYOUT,
    PAIR_BYTES,
    WAIT_S,
    WINDOW_BYTES,
    Cluster,
    assert_ended_once,
    begin,
    cluster_of,
    commit_for,
    error_of,
    send,
)


def test_success_ends_once(cluster: Cluster) -> None:
    prefill, decode, ticket = begin(cluster)
    prefill.push_all(ticket, [4, 5, 6])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert_ended_once(prefill, decode)


@pytest.mark.covers("F55", "F56", "F57")
@pytest.mark.parametrize("pushed_layers", [[], [1], [0, 1, 2]])
def test_abort_by_the_sender(cluster: Cluster, pushed_layers: list[int]) -> None:
    prefill, decode, ticket = begin(cluster)
    prefill.push_all(ticket, [4, 5, 6], layers=pushed_layers)
    prefill.connector.abort(ticket.lease_token)
    assert "aborted" in str(error_of(prefill.wait_event()))
    assert "p#1 aborted the transfer" in str(decode.wait_failed())
    assert_ended_once(prefill, decode)


@pytest.mark.parametrize("ending", ["abort", "close"])
def test_a_transfer_that_was_given_up_stops_within_one_frame(
    cluster: Cluster, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window has space for more frames, which are queued already."""
    has_left, goes_on = threading.Event(), threading.Event()
    send_chunk = SendingEnd.send_chunk

    def hold_behind_the_first(self: SendingEnd, effect: SendChunk) -> None:
        send_chunk(self, effect)
        has_left.set()
        assert goes_on.wait(WAIT_S)

    monkeypatch.setattr(SendingEnd, "send_chunk", hold_behind_the_first)
    prefill, decode, ticket = begin(cluster)
    prefill.push_all(ticket, [4, 5, 6])
    assert has_left.wait(WAIT_S)
    if ending == "abort":
        prefill.connector.abort(ticket.lease_token)
        goes_on.set()
    else:
        closing = threading.Thread(target=prefill.connector.close)
        closing.start()
        prefill.connector.sending.close()  # As the connector's thread does it, only sooner.
        goes_on.set()
        closing.join(WAIT_S)
    error_of(prefill.wait_event())
    assert "p#1 aborted the transfer" in str(decode.wait_failed())
    num_bytes = prefill.connector.statistics().bytes_sent
    # Of a frame that is not verified nothing waits: it may be a whole layer.
    frame_bytes = (3 if cluster.kind.is_one_sided else 2) * PAIR_BYTES
    # Other threads, or a card, may not even have read the first frame.
    if cluster.kind.kv_lanes == 1 and not cluster.kind.is_read_beside:
        assert num_bytes == frame_bytes
    assert num_bytes <= frame_bytes
    if ending == "abort":
        # Nothing is missing on the connection: the next one goes over it.
        send(prefill, decode, again := cluster.ticket(decode, [1, 2, 3]), [7, 8, 9])
        assert isinstance(decode.wait_event(), Landed)
        assert prefill.wait_event() == TransferEnded(again.lease_token, None)
        assert set(prefill.connector.statistics().measured.reconnects.values()) == {0}
    assert_ended_once(prefill, decode)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_bug_on_the_connectors_thread_ends_everything_all_the_same(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The error occurs again for the next chunk, while everything is being ended.

    A thread that ends by `SystemExit` ends without a word.
    """

    def fail(self: SendingEnd, effect: SendChunk) -> None:
        raise error("a bug")

    monkeypatch.setattr(SendingEnd, "send_chunk", fail)
    prefill, decode, ticket = begin(cluster)
    waiting = cluster.ticket(prefill, [1])
    prefill.connector.expect(waiting, sender_deadline_s=30)
    prefill.push_all(ticket, [4, 5, 6])
    assert "closed" in str(error_of(prefill.wait_event()))
    assert "closed" in str(prefill.wait_failed())
    assert "aborted the transfer" in str(decode.wait_failed())
    # Its owner heard of it before anything that it cannot be sure of.
    assert [(str(error), num_events) for error, num_events in prefill.failures] == [("a bug", 0)]
    assert decode.failures == []
    # Nobody is there any more to end what would begin now.
    with pytest.raises(ValueError, match="is closed"):
        prefill.connector.expect(cluster.ticket(prefill, [2]), sender_deadline_s=30)
    with pytest.raises(ValueError, match="is closed"):
        prefill.connector.open(cluster.ticket(decode, [4]), deadline_s=30)
    assert_ended_once(prefill, decode)


@pytest.mark.covers("F60")
def test_abort_behind_a_commit_tells_the_truth(cluster: Cluster) -> None:
    """Whichever arrived first, both sides agree."""
    prefill, decode, ticket = begin(cluster)
    prefill.push_all(ticket, [4, 5, 6])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    prefill.connector.abort(ticket.lease_token)
    ended, landed = prefill.wait_event(), decode.wait_event()
    assert isinstance(ended, TransferEnded)
    assert isinstance(landed, Landed) == (ended.error is None)
    if ended.error is not None:
        assert decode.wait_event() == Released(ticket.lease_token)
    assert_ended_once(prefill, decode)


@pytest.mark.covers("F57")
@pytest.mark.parametrize("pushed_layers", [[], [1], [0, 1, 2]])
def test_revoke_tells_the_sender_and_releases_the_blocks(
    cluster: Cluster, pushed_layers: list[int]
) -> None:
    prefill, decode, ticket = begin(cluster)
    prefill.push_all(ticket, [4, 5, 6], layers=pushed_layers)
    decode.connector.revoke(ticket.lease_token)
    assert decode.wait_event() == Released(ticket.lease_token)
    untouched = decode.pool.copy()
    # Released blocks may land again at once, for another.
    again = cluster.ticket(decode, ticket.target_block_ids)
    decode.connector.expect(again, sender_deadline_s=30)
    assert isinstance(error_of(prefill.wait_event()), Revoked)
    assert_ended_once(prefill)
    assert np.array_equal(decode.pool, untouched)
    decode.connector.revoke(again.lease_token)
    assert decode.wait_event() == Released(again.lease_token)
    assert_ended_once(decode)


@pytest.mark.covers("F14")
@pytest.mark.parametrize("kind", ["loopback", "zmq", "shm", "ipc", "card-zmq"])
def test_revoke_between_check_and_write(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that passed its checks is still dropped when the landing is revoked."""
    checked, revoked = threading.Event(), threading.Event()
    write = ReceivingEnd.write

    def hold(self: ReceivingEnd, *args: Any) -> None:
        checked.set()
        assert revoked.wait(20)
        write(self, *args)

    monkeypatch.setattr(ReceivingEnd, "write", hold)
    with contextlib.closing(cluster_of(kind)) as cluster:
        prefill, decode, ticket = begin(cluster)
        untouched = decode.pool.copy()
        prefill.push_all(ticket, [4, 5, 6])
        assert checked.wait(20)
        decode.connector.revoke(ticket.lease_token)
        revoked.set()
        assert "revoked" in str(error_of(prefill.wait_event()))
        decode.connector.close()
        assert np.array_equal(decode.pool, untouched)
        assert decode.events == [Released(ticket.lease_token)]


@pytest.mark.covers("F14")
@pytest.mark.parametrize("kind", ["loopback", "loopback-2", "zmq", "zmq-4", "shm", "shm-2"])
def test_blocks_of_a_revoked_landing_are_released_behind_the_last_write(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`revoke` waits for nobody, and `Released` for every frame that is being copied."""
    writing, revoked = threading.Event(), threading.Event()
    under_way: list[object] = []

    def slowed(copy: Callable[..., pieces.Sums]) -> Callable[..., pieces.Sums]:
        def slow(*args: object) -> pieces.Sums:
            under_way.append(args)
            writing.set()
            assert revoked.wait(20)
            sums = copy(*args)
            under_way.remove(args)
            return sums

        return slow

    for name in ("copy_parts", "copy_blocks"):
        monkeypatch.setattr(PieceRows, name, slowed(getattr(PieceRows, name)))
    with contextlib.closing(cluster_of(kind)) as cluster:
        prefill, decode, ticket = begin(cluster)
        prefill.push_all(ticket, [4, 5, 6])
        assert writing.wait(20)
        decode.connector.revoke(ticket.lease_token)
        assert decode.inbox.empty()
        revoked.set()
        assert decode.wait_event() == Released(ticket.lease_token)
        assert not under_way
        untouched = decode.pool.copy()
        assert "revoked" in str(error_of(prefill.wait_event()))
        decode.connector.close()
        assert np.array_equal(decode.pool, untouched)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"generation": 8}, ["7", "8"]),
        ({"lease_token": 999}, ["no such lease"]),
    ],
)
def test_a_ticket_that_is_not_the_landings(
    cluster: Cluster, change: dict[str, int], named: list[str]
) -> None:
    """Wrong generation or token: neither the pool nor the right landing is touched."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(decode, [1, 2, 3])
    decode.connector.expect(ticket, sender_deadline_s=30)
    wrong = dataclasses.replace(ticket, **change)  # type: ignore[arg-type]
    untouched = decode.pool.copy()
    prefill.connector.open(wrong, deadline_s=30)
    prefill.push_all(wrong, [4, 5, 6])
    prefill.connector.commit(wrong.lease_token, commit_for(wrong))
    message = str(error_of(prefill.wait_event()))
    assert all(text in message for text in named)
    assert np.array_equal(decode.pool, untouched)
    assert decode.events == []

    late = cluster.node("p2")
    late.connector.open(ticket, deadline_s=30)
    late.push_all(ticket, [4, 5, 6])
    late.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
    assert late.wait_event() == TransferEnded(ticket.lease_token, None)
    assert_ended_once(prefill, decode, late)


@pytest.mark.covers("F26", "F45")
def test_two_senders_with_one_ticket(cluster: Cluster) -> None:
    """The first binds the landing, the other is fenced."""
    prefill, decode, ticket = begin(cluster)
    prefill.push_all(ticket, [4, 5, 6], layers=[0])
    # Once a further handoff of the same sender is through, so was everything before it.
    probe = cluster.ticket(decode, [9])
    decode.connector.expect(probe, sender_deadline_s=30)
    prefill.connector.open(probe, deadline_s=30)
    prefill.push_all(probe, [0])
    prefill.connector.commit(probe.lease_token, commit_for(probe))
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(probe.lease_token, None)

    other = cluster.node("other")
    other.connector.open(ticket, deadline_s=30)
    other.push_all(ticket, [7, 8, 9])
    other.connector.commit(ticket.lease_token, commit_for(ticket))
    assert "p#1 writes here, not other#1" in str(error_of(other.wait_event()))
    prefill.push_all(ticket, [4, 5, 6], layers=[1, 2])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
    assert np.array_equal(decode.pool[:, :, [1, 2, 3]], prefill.pool[:, :, [4, 5, 6]])


@pytest.mark.covers("F29")
def test_layouts_that_differ_name_both_values(cluster: Cluster) -> None:
    decode = cluster.node("d")
    prefill = cluster.node("p", layout=dataclasses.replace(LAYOUT, block_size=8, dtype="int8"))
    ticket = cluster.ticket(decode, [1])
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    error = error_of(prefill.wait_event())
    assert isinstance(error, LayoutMismatch)
    assert "block_size: here 4, peer 8" in str(error)
    assert "dtype: here 'float32', peer 'int8'" in str(error)


@pytest.mark.covers("F29")
def test_a_ticket_of_another_fingerprint(cluster: Cluster) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = dataclasses.replace(cluster.ticket(decode, [1]), fingerprint="f00d")
    prefill.connector.open(ticket, deadline_s=30)
    error = error_of(prefill.wait_event())
    assert isinstance(error, LayoutMismatch)
    assert "f00d" in str(error)
    assert LAYOUT.fingerprint in str(error)


@pytest.mark.covers("F01", "F63")
def test_a_decode_node_that_restarted_refuses_the_old_ticket(cluster: Cluster) -> None:
    """The same address, another incarnation."""
    prefill, decode = cluster.node("p"), cluster.node("d", epoch=5)
    ticket = cluster.ticket(decode, [1])
    old = dataclasses.replace(ticket, decode_node=Incarnation(decode.incarnation.node_id, 4))
    prefill.connector.open(old, deadline_s=30)
    message = str(error_of(prefill.wait_event()))
    assert "stale_epoch" in message
    assert "d#4" in message
    assert "d#5" in message


@pytest.mark.covers("F68", "F69")
def test_an_earlier_life_of_a_sender_is_refused(cluster: Cluster) -> None:
    """A process that was suspended while it was replaced."""
    decode = cluster.node("d")
    for epoch, is_welcome in [(2, True), (1, False), (3, True)]:
        prefill = cluster.node("p", epoch=epoch)
        ticket = cluster.ticket(decode, [epoch])
        decode.connector.expect(ticket, sender_deadline_s=30)
        prefill.connector.open(ticket, deadline_s=30)
        prefill.push_all(ticket, [0])
        prefill.connector.commit(ticket.lease_token, commit_for(ticket))
        ended = prefill.wait_event()
        assert isinstance(ended, TransferEnded)
        assert (ended.error is None) == is_welcome


def test_closing_the_sender(cluster: Cluster) -> None:
    prefill, decode, first = begin(cluster)
    prefill.connector.abort(first.lease_token)
    error_of(prefill.wait_event())
    decode.wait_failed()
    # The connection stands now, so the receiver is told what happens on it.
    ticket = cluster.ticket(decode, [1, 2, 3])
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, [4, 5, 6], layers=[0])
    prefill.connector.close()
    assert "closed" in str(error_of(prefill.wait_event()))
    assert "aborted the transfer" in str(decode.wait_failed())  # With the end of its last copy.
    with pytest.raises(ValueError, match="closed"):
        prefill.connector.open(ticket, deadline_s=1)
    assert_ended_once(prefill, decode)


def test_closing_the_receiver(cluster: Cluster) -> None:
    """Its sender is told, or finds it silent: the connection may be closed before the message."""
    clock = ManualClock()
    prefill, decode = cluster.node("p", clock=clock), cluster.node("d")
    ticket = cluster.ticket(decode, [1, 2, 3])
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, [4, 5, 6], layers=[0])
    decode.connector.close()
    assert "closed" in str(decode.wait_failed())
    with pytest.raises(ValueError, match="closed"):
        decode.connector.expect(ticket, sender_deadline_s=1)
    prefill.pass_time_until(lambda: prefill.events, clock)
    error_of(prefill.wait_event())
    assert_ended_once(prefill, decode)


def test_closing_from_on_event(cluster: Cluster) -> None:
    closed = threading.Event()

    def on_event(event: object) -> None:
        decode.connector.close()
        closed.set()

    decode = cluster.node("d", on_event=on_event)
    decode.connector.expect(cluster.ticket(decode, [1]), sender_deadline_s=0.05)
    assert closed.wait(20)


@pytest.mark.covers("F26")
@pytest.mark.parametrize("pushed_layers", [[], [0, 2]])
def test_a_short_count_fails_both_sides(cluster: Cluster, pushed_layers: list[int]) -> None:
    prefill, decode, ticket = begin(cluster)
    prefill.push_all(ticket, [4, 5, 6], layers=pushed_layers)
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    wanted = f"sent {3 * len(pushed_layers)} pieces, wanted 9 (3 blocks, 3 layers)"
    assert wanted in str(decode.wait_failed())
    assert wanted in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill, decode)


@pytest.mark.parametrize("num_tokens", [0, 8, 13])
def test_a_prompt_that_does_not_fit_the_ticket(cluster: Cluster, num_tokens: int) -> None:
    prefill, decode, ticket = begin(cluster)
    prefill.push_all(ticket, [4, 5, 6])
    commit = dataclasses.replace(commit_for(ticket), num_tokens=num_tokens)
    prefill.connector.commit(ticket.lease_token, commit)
    assert f"prompt of {num_tokens} tokens" in str(decode.wait_failed())
    assert f"prompt of {num_tokens} tokens" in str(error_of(prefill.wait_event()))


@pytest.mark.covers("F24")
@pytest.mark.parametrize("which", [0, 1])
def test_a_bad_checksum_never_lands(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The keys' or the values' sum of one block is never what arrives, however often."""
    sums_with_frame = SendingEnd.sums_with_frame

    def lie(end: SendingEnd, effect: SendChunk, sums: pieces.Sums) -> pieces.Sums:
        changed = pieces.unpacked_sums(sums, len(effect.chunk)).copy()
        changed[which, -1] ^= np.uint64(1)
        return sums_with_frame(end, effect, changed.tobytes())

    prefill, decode = cluster.node("p", verify="block"), cluster.node("d")
    monkeypatch.setattr(SendingEnd, "sums_with_frame", lie)
    ticket = cluster.ticket(decode, [1, 2, 3])
    send(prefill, decode, ticket, [4, 5, 6])
    assert "bad checksum" in str(decode.wait_failed())
    assert "bad checksum" in str(error_of(prefill.wait_event()))
    num_failures = decode.connector.statistics().checksum_failures[cluster.lane]
    # Each damaged piece is asked for again, except those in flight when the landing fails.
    most_in_flight = BESIDE_WINDOWS * WINDOW_BYTES // PAIR_BYTES
    most = MAX_REPEATS_PER_LANDING + most_in_flight
    assert 1 + MAX_REPEATS_PER_PIECE <= num_failures <= most
    assert_ended_once(prefill, decode)
