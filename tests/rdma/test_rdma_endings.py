"""Handoffs that end in the middle of a write: the owner of the blocks, and their content."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from common.observing.clock import Clock
from kv_transfer.contract import KVEvent, Landed, LandingFailed, Released, Ticket, TransferEnded
from kv_transfer.lanes.rdma.rdma_lane import RdmaLane
from tests.rdma import rdma_kind
from tests.rdma.children import (
    WINDOW_BYTES,
    Child,
    big_node,
    decode_child,
    other_prefill_child,
    prefill_child,
    send_all,
)
from tests.rdma.devices import WAIT_S, Wire, needs_rdma, wait_until
from tests.rdma.rdma_kind import RdmaKind
from tests.rdma.two_lanes import ALL_BLOCKS, LAYOUT, NUM_BLOCKS
from tests.support.clocks.stall_free_clock import timed
from tests.support.kv.kv_cluster import Cluster, Node, commit_for, error_of

pytestmark = needs_rdma
OLD, NEW_OWNER, OTHER = 7, 0xAB, 9


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Its nodes are on device 0, 1, 0 …, as they are made."""
    cluster = Cluster(RdmaKind())
    yield cluster
    cluster.close()


@pytest.fixture
def from_device_1() -> Iterator[Cluster]:
    cluster = Cluster(RdmaKind(1))
    yield cluster
    cluster.close()


def assert_serves(decode: Node, cluster: Cluster, prefill: Node, value: int) -> None:
    """Check that a handoff to all blocks works, by RDMA, and transfers `value`."""
    ticket = cluster.ticket(decode, ALL_BLOCKS)
    decode.connector.expect(ticket, sender_deadline_s=WAIT_S)
    send_all(prefill, ticket)
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.all(decode.pool == value)
    assert prefill.connector.statistics().lanes[decode.incarnation.node_id] == "rdma"


@pytest.mark.covers("F64")
def test_a_decode_node_killed_in_the_middle_of_a_write(cluster: Cluster, wire: Wire) -> None:
    """Its silence is noticed long before the write times out; others continue meanwhile."""
    prefill = big_node(cluster, "p", OLD)
    with Child(decode_child, engine=1) as child:
        child.tell("a ticket")
        ticket = child.wait_answer()
        wire.cut()
        send_all(prefill, ticket)
        wire.wait_loss()
        child.kill()
    killed_at_s = cluster.clock.now_s()
    assert "d#1" in str(error_of(prefill.wait_event()))
    assert cluster.clock.now_s() < killed_at_s + 8

    cluster.node("unused")  # So that the next one is on device 0, to which the wire is not needed.
    other = big_node(cluster, "other", 0)
    assert_serves(other, cluster, prefill, OLD)
    prefill.assert_books_are_empty()
    _, took_s = timed(prefill.connector.close)
    assert took_s < 8


@pytest.mark.covers("F03", "F14", "F69")
@pytest.mark.parametrize("does_wake", [False, True], ids=["killed", "stopped and woken"])
def test_a_prefill_node_that_ends_in_the_middle_of_a_write(
    from_device_1: Cluster, wire: Wire, does_wake: bool
) -> None:
    """Its blocks are fenced and released, and it cannot touch them any more; a
    sender that was connected all the while goes on.
    """
    cluster = from_device_1
    decode, other = big_node(cluster, "d", 0), big_node(cluster, "other", OTHER)
    assert_serves(decode, cluster, other, OTHER)
    with Child(prefill_child, engine=0, fill=OLD) as child:
        ticket = cluster.ticket(decode, ALL_BLOCKS)
        decode.connector.expect(ticket, sender_deadline_s=WAIT_S)
        wire.cut()
        child.tell(ticket)
        wire.wait_loss()
        child.stop() if does_wake else child.kill()
        assert "p#1 was silent" in str(decode.wait_failed())
        decode.assert_books_are_empty()
        decode.pool[:] = NEW_OWNER
        wire.heal()
        if does_wake:
            child.go_on()
            assert isinstance(child.wait_answer(), TransferEnded)
    assert np.all(decode.pool == NEW_OWNER)
    assert_serves(decode, cluster, other, OTHER)
    assert set(other.connector.statistics().measured.fallbacks.values()) == {0}


class TimedLane(RdmaLane):
    """It adds up how long its engine takes to register and unregister the slabs that move.

    By the clock of its connector, which must not count a stall of the machine that this counts.
    """

    registering_s = 0.0
    clock: Clock

    def move(self, slab: int) -> bytes:
        with self._timed():
            return super().move(slab)

    def fence(self, slab: int) -> None:
        with self._timed():
            super().fence(slab)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began_at_s = self.clock.now_s()
        yield
        TimedLane.registering_s += self.clock.now_s() - began_at_s


def use_timed_lanes(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Make the lanes of nodes that are made from now on timed ones."""
    monkeypatch.setattr(rdma_kind, "RdmaLane", TimedLane)
    monkeypatch.setattr(TimedLane, "registering_s", 0.0)
    monkeypatch.setattr(TimedLane, "clock", clock, raising=False)


def hand_off(
    cluster: Cluster, decode: Node, healthy: Node, block: int, value: int
) -> dict[KVEvent, float]:
    """Hand off `block`, filled with `value`, which must land.

    Return the other events of the decode node until then, each with its time.
    """
    came_at_s: dict[KVEvent, float] = {}
    healthy.pool[:, :, block] = value
    ticket = cluster.ticket(decode, [block])
    decode.connector.expect(ticket, sender_deadline_s=WAIT_S)
    healthy.connector.open(ticket, deadline_s=WAIT_S)
    healthy.push_all(ticket, [block])
    healthy.connector.commit(ticket.lease_token, commit_for(ticket, LAYOUT))
    while (event := decode.wait_event()).lease_token != ticket.lease_token:
        came_at_s[event] = cluster.clock.now_s()
    assert isinstance(event, Landed)
    assert healthy.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.all(decode.pool[:, :, block] == value)
    return came_at_s


def hand_off_until_released(
    cluster: Cluster, decode: Node, healthy: Node, token: int, block: int
) -> dict[KVEvent, float]:
    """Hand off `block` again and again until the landing `token` is released.

    Return the events of the decode node, each with its time, but those of these handoffs.
    """
    came_at_s: dict[KVEvent, float] = {}
    for value in itertools.cycle(range(1, 100)):
        came_at_s |= hand_off(cluster, decode, healthy, block, value)
        if Released(token) in came_at_s:
            break
    return came_at_s


def connect_child(cluster: Cluster, decode: Node, child: Child, blocks: Iterable[int]) -> None:
    """Let a child hand off once, so that its queue pairs are connected.

    Mooncake answers one handshake after the other, and waits 5 s for one whose client is stopped:
    a child that is stopped in its first handshake would stop all others' handshakes.
    """
    ticket = cluster.ticket(decode, tuple(blocks))
    decode.connector.expect(ticket, sender_deadline_s=WAIT_S)
    child.tell(ticket)
    assert isinstance(decode.wait_event(), Landed)
    assert child.wait_answer() == TransferEnded(ticket.lease_token, None)


def half_of_each(
    cluster: Cluster, decode: Node, other: Node, blocks: Iterable[int]
) -> dict[int, Ticket]:
    """Open a landing for each block, and wait until one of its two layers is there."""
    tickets = {block: cluster.ticket(decode, [block]) for block in blocks}
    for block, ticket in tickets.items():
        decode.connector.expect(ticket, sender_deadline_s=10 * WAIT_S)
        other.connector.open(ticket, deadline_s=10 * WAIT_S)
        other.push_all(ticket, [block], layers=[0])
    # Its writes take the wire that is cut next, and must not be among those that are lost.
    num_bytes = len(tickets) * 2 * LAYOUT.piece_bytes
    received = decode.connector.statistics
    wait_until(lambda: received().bytes_received == num_bytes, "a layer of each landing is there")
    return tickets


def wait_begun(decode: Node, ticket: Ticket) -> None:
    """Wait for a sender's BEGIN: where two send, a lost packet does not say whose it was."""
    landing = decode.connector.receiving.machine.landings.get(ticket.lease_token)
    assert landing is not None
    wait_until(lambda: landing.session is not None, "the landing began")


def landed_of(decode: Node, left: set[int]) -> set[int]:
    """Wait until each landing of `left` has landed or is released; return those that landed."""
    landed = set()
    while left:
        event = decode.wait_event()
        if not isinstance(event, LandingFailed):
            left.discard(event.lease_token)
        landed |= {event.lease_token} if isinstance(event, Landed) else set()
    return landed


@pytest.mark.parametrize("reports", [True, False], ids=["all report", "one does not report"])
@pytest.mark.parametrize("does_wake", [False, True], ids=["killed", "stopped and woken"])
def test_blocks_of_a_dead_writer_come_back_beside_a_hundred_open_landings(
    from_device_1: Cluster,
    wire: Wire,
    does_wake: bool,
    reports: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the same slabs; what the others have written, and write afterwards, lands all the same.

    The blocks are back within 5 s, with the times of a node, and what these emulated devices take
    to register memory. A healthy sender writes all the while; another one, connected, may be in the
    middle of a write that does not end. That alone takes 4.5 s, so only the simulation has a limit
    of 5 s there. A writer that wakes does so while all landings are open.
    """
    use_timed_lanes(monkeypatch, from_device_1.clock)
    num_blocks = 10 * NUM_BLOCKS
    # The healthy one is on the device of the decode node, to which the wire is not needed.
    decode, other, healthy = (
        from_device_1.node(name, layout=LAYOUT, window_bytes=WINDOW_BYTES, num_blocks=num_blocks)
        for name in ("d", "other", "healthy")
    )
    decode.pool[:], other.pool[:] = 0, OTHER
    of_the_dead, of_the_stuck = tuple(range(0, num_blocks, 10)), tuple(range(9, num_blocks, 10))
    of_the_other = [block for block in range(num_blocks) if 0 < block % 10 < 8][:100]
    tickets = half_of_each(from_device_1, decode, other, of_the_other)
    with (
        Child(prefill_child, engine=0, fill=OLD) as child,
        Child(other_prefill_child, engine=0, fill=OLD) as stuck,
    ):
        block = num_blocks - 2
        hand_off(from_device_1, decode, healthy, block, OTHER)
        connect_child(from_device_1, decode, child, of_the_dead)
        if not reports:
            connect_child(from_device_1, decode, stuck, of_the_stuck)
        ticket = from_device_1.ticket(decode, of_the_dead)
        decode.connector.expect(ticket, sender_deadline_s=WAIT_S)
        left = {one.lease_token for one in tickets.values()}
        wire.cut()
        if not reports:
            beside = from_device_1.ticket(decode, of_the_stuck)
            decode.connector.expect(beside, sender_deadline_s=WAIT_S)
            stuck.tell(beside)
            wire.wait_loss()
            left.add(beside.lease_token)
        child.tell(ticket)
        wait_begun(decode, ticket)
        wire.wait_loss(since=wire.num_lost)
        child.stop() if does_wake else child.kill()
        began_at_s = from_device_1.clock.now_s()
        token = ticket.lease_token
        came_at_s = hand_off_until_released(from_device_1, decode, healthy, token, block)
        span_s = came_at_s[Released(token)] - began_at_s
        assert span_s - TimedLane.registering_s < (5.0 if reports else 10.0)
        failed = next(event for event in came_at_s if event.lease_token == token)
        assert "p#1 was silent" in str(error_of(failed))
        left -= {event.lease_token for event in came_at_s if isinstance(event, Released)}
        decode.pool[:, :, list(of_the_dead)] = NEW_OWNER
        wire.heal()
        if does_wake:
            child.go_on()
            assert isinstance(child.wait_answer(), TransferEnded)
        for block, ticket in tickets.items():
            other.push_all(ticket, [block], layers=[1])
            other.connector.commit(ticket.lease_token, commit_for(ticket, LAYOUT))
        assert {one.lease_token for one in tickets.values()} <= landed_of(decode, left)
    assert np.all(decode.pool[:, :, list(of_the_dead)] == NEW_OWNER)
    assert np.all(decode.pool[:, :, of_the_other] == OTHER)
    decode.assert_books_are_empty()
    assert set(other.connector.statistics().measured.fallbacks.values()) == {0}


@pytest.mark.covers("F56")
def test_abort_during_a_write(cluster: Cluster, wire: Wire) -> None:
    """The blocks come back when the write is over, not before."""
    prefill, decode = big_node(cluster, "p", OLD), big_node(cluster, "d", 0)
    ticket = cluster.ticket(decode, ALL_BLOCKS)
    decode.connector.expect(ticket, sender_deadline_s=WAIT_S)
    wire.cut()
    send_all(prefill, ticket)
    wire.wait_loss()
    prefill.connector.abort(ticket.lease_token)
    decode.connector.revoke(ticket.lease_token)
    error_of(prefill.wait_event())
    assert decode.connector.statistics().blocks_quarantined == NUM_BLOCKS
    assert decode.events == []
    wire.heal()
    assert decode.wait_event() == Released(ticket.lease_token)
    decode.assert_books_are_empty()
    decode.pool[:] = NEW_OWNER
    # What travels on this connection from now on is behind all that travelled before.
    other = big_node(cluster, "other", 0)
    assert_serves(other, cluster, prefill, OLD)
    assert np.all(decode.pool == NEW_OWNER)
    assert_serves(decode, cluster, prefill, OLD)


@pytest.mark.covers("F13", "F69")
@pytest.mark.parametrize("is_same_lease", [False, True])
def test_a_stale_generation_after_the_block_was_given_to_someone_else(
    cluster: Cluster, is_same_lease: bool
) -> None:
    """Nothing is written before the receiver agreed to this very ticket."""
    prefill, decode = big_node(cluster, "p", OLD), big_node(cluster, "d", 0)
    stale = cluster.ticket(decode, ALL_BLOCKS)
    decode.connector.expect(stale, sender_deadline_s=WAIT_S)
    decode.connector.revoke(stale.lease_token)
    assert decode.wait_event() == Released(stale.lease_token)
    fresh = dataclasses.replace(cluster.ticket(decode, ALL_BLOCKS), generation=8)
    decode.connector.expect(fresh, sender_deadline_s=WAIT_S)
    decode.pool[:] = NEW_OWNER
    if is_same_lease:
        stale = dataclasses.replace(fresh, generation=7)
    send_all(prefill, stale)
    error_of(prefill.wait_event())
    assert np.all(decode.pool == NEW_OWNER)
    send_all(prefill, fresh)
    assert isinstance(decode.wait_event(), Landed)
    assert np.all(decode.pool == OLD)


def test_memory_that_is_not_registered_any_more(cluster: Cluster, wire: Wire) -> None:
    """The write fails, the pair falls back to ZMQ, and the next handoff works."""
    prefill, decode = big_node(cluster, "p", OLD), big_node(cluster, "d", 0)
    assert_serves(decode, cluster, prefill, OLD)
    kind = cluster.kind
    assert isinstance(kind, RdmaKind)
    kind.unregister(decode.pool)
    ticket = cluster.ticket(decode, ALL_BLOCKS)
    decode.connector.expect(ticket, sender_deadline_s=WAIT_S)
    send_all(prefill, ticket)
    assert isinstance(decode.wait_event(), LandingFailed)
    error_of(prefill.wait_event())
    assert decode.wait_event() == Released(ticket.lease_token)
    ticket = cluster.ticket(decode, ALL_BLOCKS)
    decode.connector.expect(ticket, sender_deadline_s=WAIT_S)
    send_all(prefill, ticket)
    assert isinstance(decode.wait_event(), Landed)
    statistics = prefill.connector.statistics()
    wait_until(lambda: prefill.connector.statistics().lanes.get("d") == "zmq", "zmq is used")
    assert statistics.measured.fallbacks["rdma", "write_failed"] == 1
