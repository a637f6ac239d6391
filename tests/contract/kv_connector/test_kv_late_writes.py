"""A writer that ignores every end cannot change a block after it was given to another request."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kv_transfer.contract import (
    ConnectorEvent,
    Landed,
    LandingFailed,
    Released,
    Ticket,
    TransferEnded,
)
from kv_transfer.receiving.effects import DropReason, Write
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S
from kv_transfer.wire import frames
from tests.contract.kv_connector.raw_sender import RawSender
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.fake_one_sided_lane import FakeOneSidedLane
from tests.support.kv.kinds import FakeRdmaKind
from tests.support.kv.kv_cluster import (
    LAYOUT,
    PAIR_BYTES,
    TIME_STEP_S,
    WAIT_S,
    WINDOW_BYTES,
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

BLOCKS = (1, 2, 3)


@pytest.fixture(params=["loopback", "zmq", "shm", "ipc", "card-zmq"])
def two_sided(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Kinds in which the receiver is the only writer of its pool."""
    with contextlib.closing(cluster_of(request.param)) as cluster:
        yield cluster


@pytest.mark.covers("F14")
@pytest.mark.parametrize("ending", ["revoked", "aborted by another frame", "bad data"])
def test_frames_of_a_landing_that_ended_change_nothing(two_sided: Cluster, ending: str) -> None:
    """Pieces continue to arrive while another landing expects and fills the blocks."""
    cluster = two_sided
    prefill, decode = cluster.node("p"), cluster.node("d")
    with contextlib.closing(RawSender(cluster, decode)) as rogue:
        old = cluster.ticket(decode, BLOCKS)
        decode.connector.expect(old, sender_deadline_s=30)
        rogue.send(frames.Begin(old.lease_token, old.generation))
        rogue.data(old, generation=old.generation, layer=0, ordinal=0)
        rogue.settle()
        # The piece landed: the rogue's frames are good as long as the landing is open.
        wait_until(lambda: np.array_equal(decode.pool[0, :, BLOCKS[0]], rogue.pool[0, :, 0]))
        if ending == "revoked":
            decode.connector.revoke(old.lease_token)
        elif ending == "bad data":
            rogue.data(old, generation=old.generation, layer=LAYOUT.num_layers - 1, ordinal=9)
        else:
            rogue.send(frames.Abort(old.lease_token, old.generation))
        while decode.wait_event() != Released(old.lease_token):
            pass

        new = dataclasses.replace(cluster.ticket(decode, BLOCKS), generation=old.generation + 1)
        decode.connector.expect(new, sender_deadline_s=30)
        _write_everywhere(rogue, old, new)
        send_opened(prefill, new)
        assert isinstance(decode.wait_event(), Landed)
        assert prefill.wait_event() == TransferEnded(new.lease_token, None)
        _write_everywhere(rogue, old, new)
        wanted = prefill.pool[:, :, [4, 5, 6]]
        assert np.array_equal(decode.pool[:, :, list(BLOCKS)], wanted)
        dropped = decode.connector.statistics().frames_dropped
        per_round = LAYOUT.num_layers * len(BLOCKS)
        # Round one: the old lease is closed; the new one at the old generation; not by this sender.
        assert dropped[DropReason.STALE_GENERATION.value] == per_round
        assert dropped[DropReason.WRONG_SENDER.value] == per_round
        # And round two, when both are closed.
        assert dropped[DropReason.LATE.value] == 4 * per_round
    assert_ended_once(decode)


def send_opened(prefill: Node, ticket: Ticket) -> None:
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, [4, 5, 6])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))


def _write_everywhere(rogue: RawSender, old: Ticket, new: Ticket) -> None:
    """Write every piece for the old lease, the new one at the old generation, and the new one."""
    for layer in range(LAYOUT.num_layers):
        for ordinal in range(len(BLOCKS)):
            rogue.data(old, generation=old.generation, layer=layer, ordinal=ordinal)
            rogue.data(new, generation=old.generation, layer=layer, ordinal=ordinal)
            rogue.data(new, generation=new.generation, layer=layer, ordinal=ordinal)
    rogue.settle()


@pytest.mark.covers("F14")
def test_the_last_look_at_a_landing_is_right_before_the_write(
    two_sided: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The landing is open when its frame is checked, and revoked before the copy."""
    may_write = Receiver.may_write
    looked = threading.Event()

    def revoked_now(self: Receiver, write: Write) -> bool:
        self.on_revoke(write.data.lease_token)
        looked.set()
        return may_write(self, write)

    monkeypatch.setattr(Receiver, "may_write", revoked_now)
    prefill, decode, ticket = begin(two_sided)
    untouched = decode.pool.copy()
    prefill.push_all(ticket, [4, 5, 6])
    assert looked.wait(WAIT_S)
    prefill.connector.close()
    decode.connector.close()
    assert np.array_equal(decode.pool, untouched)


def test_the_same_sender_on_another_connection_is_not_the_writer(two_sided: Cluster) -> None:
    """DATA counts only on the connection that began the landing, while that is its sender's."""
    cluster = two_sided
    decode = cluster.node("d")
    ticket = cluster.ticket(decode, BLOCKS)
    decode.connector.expect(ticket, sender_deadline_s=30)
    begin = frames.Begin(ticket.lease_token, ticket.generation)
    with contextlib.closing(RawSender(cluster, decode)) as first:
        first.send(begin)
        first.settle()
        untouched = decode.pool.copy()
        with contextlib.closing(RawSender(cluster, decode)) as second:
            second.data(ticket, generation=ticket.generation, layer=0, ordinal=0)
            second.settle()
            assert np.array_equal(decode.pool, untouched)
            assert decode.connector.statistics().frames_dropped["wrong_sender"] == 1
            # It takes over by beginning again. The first connection is over.
            second.send(begin)
            second.settle()
            first.data(ticket, generation=ticket.generation, layer=0, ordinal=1)
            refused = first.answer()
            assert isinstance(refused, frames.Rejected)
            assert refused.code == frames.NO_SESSION
            assert np.array_equal(decode.pool, untouched)
            second.data(ticket, generation=ticket.generation, layer=0, ordinal=2)
            # Some lanes copy later.
            wait_until(lambda: np.array_equal(decode.pool[0, :, BLOCKS[2]], second.pool[0, :, 0]))
    assert decode.events == []


@pytest.fixture
def kind() -> FakeRdmaKind:
    return FakeRdmaKind()


@pytest.fixture
def one_sided(kind: FakeRdmaKind) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(kind)) as cluster:
        yield cluster


def held_in_the_network(
    cluster: Cluster, kind: FakeRdmaKind, clock: ManualClock | None = None
) -> tuple[Node, Node, Ticket]:
    """A handoff of which a third stays in the network."""
    prefill, decode, ticket = begin(cluster, clock=clock)
    kind.fabric.hold()
    prefill.push_all(ticket, [4, 5, 6], layers=[0])
    kind.fabric.wait_under_way(3)
    return prefill, decode, ticket


@pytest.mark.covers("F14")
def test_blocks_of_a_revoked_landing_wait_for_the_writes_under_way(
    one_sided: Cluster, kind: FakeRdmaKind
) -> None:
    """The abort travels behind them; late writes land while the blocks are nobody else's."""
    prefill, decode, ticket = held_in_the_network(one_sided, kind)
    decode.connector.revoke(ticket.lease_token)
    assert error_of(prefill.wait_event()).code == "handoff_failed"
    assert decode.connector.statistics().blocks_quarantined == 3
    with pytest.raises(ValueError, match="was not released yet"):
        decode.connector.expect(one_sided.ticket(decode, BLOCKS), sender_deadline_s=30)
    # The sender's blocks are its own again, and what they now hold is another prompt's.
    prefill.pool[:, :, [4, 5, 6]] ^= 0xFF
    assert decode.events == []
    kind.fabric.release()
    assert decode.wait_event() == Released(ticket.lease_token)
    assert np.array_equal(decode.pool[0][:, [1, 2, 3]], prefill.pool[0][:, [4, 5, 6]])
    again = one_sided.ticket(decode, BLOCKS)
    send(prefill, decode, again, [7, 8, 9])
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(again.lease_token, None)
    assert np.array_equal(decode.pool[:, :, [1, 2, 3]], prefill.pool[:, :, [7, 8, 9]])
    assert_ended_once(prefill, decode)


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("ending", ["aborts", "expires", "dies", "is cut off"])
def test_a_writer_that_is_never_done_is_fenced(
    one_sided: Cluster, kind: FakeRdmaKind, ending: str
) -> None:
    """Its writes arrive when its blocks belong to another handoff, and are refused."""
    clock = ManualClock()
    prefill, decode = (one_sided.node(name, peer_timeout_s=0.4, clock=clock) for name in "pd")
    ticket = one_sided.ticket(decode, BLOCKS)
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=0.2 if ending == "expires" else 30)
    kind.fabric.hold()
    prefill.push_all(ticket, [4, 5, 6], layers=[0])
    kind.fabric.wait_under_way(3)
    match ending:
        case "aborts":
            prefill.connector.abort(ticket.lease_token)
            # It is not told ABORTED while its ABORT waits behind what is never done.
            prefill.connector.close()
        case "expires":
            clock.advance(0.2)
            prefill.look_at_the_time()
            assert "deadline" in str(error_of(prefill.wait_event()))
            assert decode.connector.statistics().landings_open == 1
            prefill.connector.close()
        case "dies":
            prefill.connector.close()
        case _:
            kind.network.cut(decode.connector.endpoint)
    decode.pass_time_until(lambda: len(decode.events) == 2, clock)
    assert isinstance(failed := decode.wait_event(), LandingFailed)
    assert failed.lease_token == ticket.lease_token
    assert decode.wait_event() == Released(ticket.lease_token)
    assert kind.one_sided[1].fences == [0]

    other = one_sided.node("other")
    kind.fabric.let_pass()
    again = one_sided.ticket(decode, BLOCKS)
    send(other, decode, again, [7, 8, 9])
    assert isinstance(decode.wait_event(), Landed)
    assert kind.fabric.num_under_way == 3
    kind.fabric.release()
    assert kind.fabric.num_refused == 3
    assert np.array_equal(decode.pool[:, :, [1, 2, 3]], other.pool[:, :, [7, 8, 9]])
    decode.assert_books_are_empty()


def test_a_dead_writer_is_fenced_while_another_sender_is_in_the_middle_of_a_landing(
    one_sided: Cluster, kind: FakeRdmaKind
) -> None:
    """In the same slab, with a write under way: the fence waits for that write and no longer."""
    clock = ManualClock()
    prefill, decode, ticket = held_in_the_network(one_sided, kind, clock)
    kind.fabric.let_pass()
    other = one_sided.node("other", clock=clock)
    beside = one_sided.ticket(decode, [0])
    decode.connector.expect(beside, sender_deadline_s=30)
    other.connector.open(beside, deadline_s=30)
    other.push_all(beside, [7], layers=[0])
    wait_until(lambda: kind.fabric.num_written == 1)
    kind.fabric.hold()
    other.push_all(beside, [7], layers=[1])
    kind.fabric.wait_under_way(4)
    prefill.connector.close()

    def until_seen(is_so: Callable[[], bool]) -> None:
        while not is_so():
            clock.advance(TIME_STEP_S)
            for node in (other, decode):  # So that the pings of the one come to the other.
                wait_for_two_turns(node)
            assert clock.now_s() < 2 * DEFAULT_PEER_TIMEOUT_S

    until_seen(lambda: bool(decode.events))
    assert isinstance(decode.wait_event(), LandingFailed)
    until_seen(lambda: kind.one_sided[1].num_moved == 1)
    assert decode.connector.statistics().blocks_quarantined == len(BLOCKS)
    assert kind.one_sided[1].fences == []
    # The write of the other sender, at the old address, behind those of the dead one.
    kind.fabric.let_pass()
    kind.fabric.step(4)
    assert decode.wait_event() == Released(ticket.lease_token)
    other.push_all(beside, [7], layers=range(2, LAYOUT.num_layers))
    other.connector.commit(beside.lease_token, commit_for(beside))
    assert decode.wait_event() == Landed(beside.lease_token, commit_for(beside))
    assert other.wait_event() == TransferEnded(beside.lease_token, None)
    assert np.array_equal(decode.pool[:, :, 0], other.pool[:, :, 7])
    assert set(other.connector.statistics().measured.fallbacks.values()) == {0}


def wait_for_two_turns(node: Node) -> None:
    """Wait until the connector's thread has looked at the time and done what was due."""
    num_turns = node.connector.num_turns + 1
    wait_until(lambda: node.connector.num_turns > num_turns, node.look_at_the_time)


@pytest.mark.covers("F15")
def test_a_connected_sender_whose_write_does_not_end_delays_a_fence_by_less_than_five_seconds(
    one_sided: Cluster, kind: FakeRdmaKind
) -> None:
    """It pings all the while, with the times of a node, and does not report."""
    clock = ManualClock()
    prefill = one_sided.node("p", clock=ManualClock())  # It stands still: as good as dead.
    decode, other = (one_sided.node(name, clock=clock) for name in ("d", "other"))
    tickets = [one_sided.ticket(decode, blocks) for blocks in (BLOCKS, [0])]
    kind.fabric.hold()
    for node, ticket in zip((prefill, other), tickets, strict=True):
        decode.connector.expect(ticket, sender_deadline_s=30)
        node.connector.open(ticket, deadline_s=30)
        node.push_all(ticket, [4, 5, 6][: len(ticket.target_block_ids)], layers=[0])
    kind.fabric.wait_under_way(4)

    died_at_s = clock.now_s()
    while Released(tickets[0].lease_token) not in decode.events:
        clock.advance(TIME_STEP_S)
        for node in (other, decode):
            wait_for_two_turns(node)
        assert clock.now_s() - died_at_s < 5.0
    assert decode.connector.statistics().landings_open == 1, "the other one goes on"


@pytest.mark.covers("F14")
def test_a_sender_writes_nothing_before_its_begin_was_answered(
    one_sided: Cluster, kind: FakeRdmaKind
) -> None:
    """The control connection may be slower than the writes.

    A landing without a registered writer is released at once, so before BEGUN no sender may write.
    """
    prefill, decode = one_sided.node("p"), one_sided.node("d")
    first = one_sided.ticket(decode, [8])
    send(prefill, decode, first, [8])
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(first.lease_token, None)
    # The pair is connected. Now its frames are slow, and RDMA is not.
    kind.network.hold()
    num_written = kind.fabric.num_written
    ticket = one_sided.ticket(decode, BLOCKS)
    send(prefill, decode, ticket, [4, 5, 6])
    untouched = decode.pool.copy()
    assert kind.network.wait_held(1, WAIT_S)
    decode.connector.revoke(ticket.lease_token)
    assert decode.wait_event() == Released(ticket.lease_token)
    kind.network.release()
    assert "revoked" in str(error_of(prefill.wait_event()))
    assert kind.fabric.num_written == num_written
    assert np.array_equal(decode.pool, untouched)


def test_nothing_counts_as_written_before_it_is(one_sided: Cluster, kind: FakeRdmaKind) -> None:
    """Completion before commit: the header of a chunk travels behind its bytes."""
    prefill, decode, other = (one_sided.node(name) for name in ("p", "d", "other"))
    kind.fabric.hold()
    ticket = one_sided.ticket(decode, BLOCKS)
    send(prefill, decode, ticket, [4, 5, 6])
    kind.fabric.wait_under_way(WINDOW_BYTES // PAIR_BYTES)
    kind.fabric.let_pass()
    # What was said to the decode node before this handoff has been heard when it has landed.
    send(other, decode, again := one_sided.ticket(decode, [8]), [8])
    assert decode.wait_event() == Landed(again.lease_token, commit_for(again))
    assert decode.connector.statistics().bytes_received == LAYOUT.num_layers * PAIR_BYTES
    kind.fabric.release()
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket))
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool[:, :, list(BLOCKS)], prefill.pool[:, :, [4, 5, 6]])
    assert_ended_once(prefill, decode)


def test_closing_waits_for_nobody_and_releases_everything(
    one_sided: Cluster, kind: FakeRdmaKind
) -> None:
    """After its lanes are closed, no sender can write the pool."""
    prefill, decode, ticket = held_in_the_network(one_sided, kind)
    decode.connector.revoke(ticket.lease_token)
    decode.connector.close()
    assert decode.events == [Released(ticket.lease_token)]
    untouched = decode.pool.copy()
    kind.fabric.release()
    assert kind.fabric.num_refused > 0
    assert np.array_equal(decode.pool, untouched)
    error_of(prefill.wait_event())
    assert_ended_once(prefill, decode)


@pytest.mark.covers("F14")
def test_closing_takes_the_keys_away_before_it_releases_a_block(
    one_sided: Cluster, kind: FakeRdmaKind
) -> None:
    """After `Released` the owner may allocate the blocks at once."""
    keys_then: list[list[int]] = []

    def take(event: ConnectorEvent) -> None:
        if isinstance(event, Released):
            keys_then.append(list(kind.one_sided[1].keys))

    prefill, decode = one_sided.node("p"), one_sided.node("d", on_event=take)
    tickets = [one_sided.ticket(decode, blocks) for blocks in ([1, 2], [3])]
    kind.fabric.hold()
    for ticket in tickets:
        decode.connector.expect(ticket, sender_deadline_s=30)
        prefill.connector.open(ticket, deadline_s=30)
        prefill.push_all(ticket, [4, 5][: len(ticket.target_block_ids)], layers=[0])
    kind.fabric.wait_under_way(3)
    # One is in quarantine, one is open.
    decode.connector.revoke(tickets[0].lease_token)
    decode.connector.close()
    assert keys_then == [[], []]


def test_a_sender_that_closes_says_so_when_its_last_write_is_done(
    one_sided: Cluster, kind: FakeRdmaKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its peer need not wait for a timeout, nor fence it."""
    close = FakeOneSidedLane.close

    def write_what_is_queued_then_close(self: FakeOneSidedLane) -> None:
        kind.fabric.release()
        close(self)

    prefill, decode, _ = held_in_the_network(one_sided, kind)
    monkeypatch.setattr(FakeOneSidedLane, "close", write_what_is_queued_then_close)
    prefill.connector.close()
    assert "closed" in str(error_of(prefill.wait_event()))
    assert "p#1 aborted the transfer" in str(decode.wait_failed())
    assert kind.one_sided[1].fences == []
    assert_ended_once(prefill, decode)
