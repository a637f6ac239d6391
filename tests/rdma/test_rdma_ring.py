"""Rings of nodes on cards, read by RDMA: what arrives, and what ends in the middle of a read.

The cards are played by host memory (`FakeCard`); rings, keys and reads are real.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kv_transfer.contract import Landed, LandingFailed, Released, Ticket, TransferEnded
from tests.rdma.children import Child
from tests.rdma.devices import WAIT_S, Wire, needs_rdma, wait_until
from tests.rdma.ring_children import (
    READY,
    card_decode_child,
    card_node,
    card_prefill_child,
    hand_over,
    ring_cluster,
)
from tests.rdma.two_lanes import ALL_BLOCKS, LAYOUT, NUM_BLOCKS
from tests.support.engine.fake_card import FakeCard
from tests.support.kv.kinds import CardRdmaKind
from tests.support.kv.kv_cluster import Cluster, Node, commit_for, error_of

pytestmark = needs_rdma
OLD, NEW_OWNER, OTHER = 7, 0xAB, 9
OF_THE_DEAD, OF_OTHERS = ALL_BLOCKS[:12], ALL_BLOCKS[12:]
_FIRST_ENGINES = itertools.count(200, 4)
"""A test has engines of its own, which no other file uses: what fails at a fence, or on a wire that
is cut, disturbs a pair of them for a while."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Its nodes are on device 0, 1, 0 …, as they are made."""
    cluster = ring_cluster(next(_FIRST_ENGINES))
    yield cluster
    cluster.close()


@pytest.fixture
def from_device_1() -> Iterator[Cluster]:
    cluster = ring_cluster(next(_FIRST_ENGINES) + 1)
    yield cluster
    cluster.close()


def card_of(cluster: Cluster, node: Node) -> FakeCard:
    assert isinstance(cluster.kind, CardRdmaKind)
    return cluster.kind.card(node.pool)


def assert_all_slots_are_free(*nodes: Node) -> None:
    for node in nodes:
        ring = node.connector.ring
        assert ring is not None
        for slots in (ring.sending, ring.receiving):
            wait_until(
                lambda slots=slots: (slots.num_lent, slots.num_waiting) == (0, 0),  # type: ignore[misc]
                f"the slots of {node.incarnation} are free",
            )


def ticket_of(cluster: Cluster, decode: Node, blocks: Sequence[int] = ALL_BLOCKS) -> Ticket:
    ticket = cluster.ticket(decode, blocks)
    decode.connector.expect(ticket, sender_deadline_s=WAIT_S)
    return ticket


def assert_serves(
    decode: Node, cluster: Cluster, prefill: Node, blocks: Sequence[int] = ALL_BLOCKS
) -> None:
    """Check that a handoff to these blocks works, by RDMA, whatever else is going on."""
    decode.pool[:, :, list(blocks)] = 0
    ticket = ticket_of(cluster, decode, blocks)
    hand_over(prefill, ticket)
    landed = Landed(ticket.lease_token, commit_for(ticket, LAYOUT))
    wait_until(lambda: landed in decode.events, "it landed")
    wait_until(lambda: TransferEnded(ticket.lease_token, None) in prefill.events, "it ended")
    assert np.array_equal(decode.pool[:, :, list(blocks)], prefill.pool[:, :, : len(blocks)])
    assert prefill.connector.statistics().lanes[decode.incarnation.node_id] == "rdma_read"


def has_failed(node: Node, ticket: Ticket) -> bool:
    return any(
        isinstance(one, LandingFailed) and one.lease_token == ticket.lease_token
        for one in node.events
    )


@pytest.mark.parametrize("are_at_once", [False, True])
def test_a_cache_gets_through_rings_of_a_few_slots(cluster: Cluster, are_at_once: bool) -> None:
    """Both ways; an eighth of a layer fits into the slots of a receiver.

    Where both ways are used at once, Mooncake may make a connection anew, and end the one on which
    a read is under way. That read fails, and `zmq` is taken for a while: the bytes are the same.
    """
    one, two = card_node(cluster, "a", 0), card_node(cluster, "b", 0)
    rng = np.random.default_rng(3)
    for node in (one, two):
        node.pool[:] = rng.integers(0, 256, node.pool.shape, dtype=np.uint8)
    half = NUM_BLOCKS // 2
    wanted = {id(one): two.pool[:, :, half:].copy(), id(two): one.pool[:, :, half:].copy()}
    for sender, receiver in ((one, two), (two, one)):
        ticket = cluster.ticket(receiver, range(half))
        receiver.connector.expect(ticket, sender_deadline_s=WAIT_S)
        sender.connector.open(ticket, deadline_s=WAIT_S)
        sender.push_all(ticket, range(half, NUM_BLOCKS))
        sender.connector.commit(ticket.lease_token, commit_for(ticket, LAYOUT))
        if not are_at_once:
            assert isinstance(receiver.wait_event(), Landed)
            assert sender.wait_event() == TransferEnded(ticket.lease_token, None)
            assert set(sender.connector.statistics().lanes.values()) == {"rdma_read"}
    for node in (one, two):
        if are_at_once:
            assert {type(node.wait_event()) for _ in range(2)} == {Landed, TransferEnded}
        else:
            assert not any(node.connector.statistics().frames_dropped.values())
        assert np.array_equal(node.pool[:, :, :half], wanted[id(node)])
        node.assert_books_are_empty()
    assert_all_slots_are_free(one, two)


def test_a_receiver_whose_slots_are_taken_holds_its_sender_back(cluster: Cluster) -> None:
    prefill, decode = card_node(cluster, "p", OLD), card_node(cluster, "d", 0)
    card = card_of(cluster, decode)
    card.copier.hold()
    ticket = ticket_of(cluster, decode)
    hand_over(prefill, ticket)
    ring = decode.connector.ring
    assert ring is not None
    wait_until(lambda: ring.receiving.num_waiting > 0, "a frame waits for slots")
    assert decode.events == prefill.events == []
    card.copier.release()
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.all(decode.pool == OLD)
    assert_all_slots_are_free(prefill, decode)


@pytest.mark.covers("F64")
def test_a_decode_node_killed_in_the_middle_of_a_read(cluster: Cluster, wire: Wire) -> None:
    """Its silence is noticed, its slots serve others, and closing takes no longer."""
    prefill = card_node(cluster, "p", OLD)
    with Child(card_decode_child, engine=1) as child:
        assert child.wait_answer() == READY
        child.tell(NUM_BLOCKS)
        ticket = child.wait_answer()
        wire.cut()
        hand_over(prefill, ticket)
        wire.wait_loss()
        child.kill()
    killed_at_s = cluster.clock.now_s()
    assert "d#1" in str(error_of(prefill.wait_event()))
    assert cluster.clock.now_s() < killed_at_s + 8
    assert_all_slots_are_free(prefill)
    cluster.node("unused")  # So that the next one is on device 0, to which the wire is not needed.
    assert_serves(card_node(cluster, "other", 0), cluster, prefill)
    prefill.assert_books_are_empty()


@pytest.mark.covers("F56")
@pytest.mark.parametrize("how", ["abort", "revoke"])
def test_a_transfer_that_ends_in_the_middle_of_a_read(
    cluster: Cluster, wire: Wire, how: str
) -> None:
    """The blocks and slots come back when the read is over, not before."""
    prefill, decode = card_node(cluster, "p", OLD), card_node(cluster, "d", 0)
    ticket = ticket_of(cluster, decode)
    wire.cut()
    hand_over(prefill, ticket)
    wire.wait_loss()
    if how == "abort":
        prefill.connector.abort(ticket.lease_token)
    else:
        decode.connector.revoke(ticket.lease_token)
    error_of(prefill.wait_event())
    wait_until(
        lambda: decode.connector.statistics().blocks_quarantined == NUM_BLOCKS, "blocks are held"
    )
    assert Released(ticket.lease_token) not in decode.events
    wire.heal()
    wait_until(lambda: Released(ticket.lease_token) in decode.events, "its blocks are back")
    assert_all_slots_are_free(prefill, decode)
    decode.assert_books_are_empty()


def test_a_handoff_goes_on_over_zmq_when_reads_fail(cluster: Cluster, wire: Wire) -> None:
    """The wire heals when the read was given up: it lands nowhere, and nothing was lost."""
    prefill, decode = card_node(cluster, "p", OLD), card_node(cluster, "d", 0)
    ticket = ticket_of(cluster, decode)
    wire.cut()
    hand_over(prefill, ticket)
    dropped = decode.connector.statistics
    wait_until(lambda: dropped().frames_dropped["unread"] > 0, "a read failed")
    wire.heal()
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket, LAYOUT))
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.all(decode.pool == OLD)
    assert prefill.connector.statistics().lanes == {"d": "zmq"}
    assert prefill.connector.statistics().measured.fallbacks["rdma_read", "not_agreed"] == 1
    assert_all_slots_are_free(prefill, decode)


@pytest.mark.covers("F03", "F14", "F69")
@pytest.mark.parametrize("does_wake", [True, False], ids=["stopped and woken", "killed"])
def test_a_prefill_node_that_ends_in_the_middle_of_a_read(
    from_device_1: Cluster, wire: Wire, does_wake: bool
) -> None:
    """Blocks and slots come back when the read is over and fenced, and nothing gets into them; a
    sender that was connected all the while goes on.
    """
    cluster = from_device_1
    decode = card_node(cluster, "d", 0)
    cluster.node("unused")
    other = card_node(cluster, "other", OTHER)
    assert_serves(decode, cluster, other)
    with Child(card_prefill_child, engine=0, fill=OLD) as child:
        assert child.wait_answer() == READY
        ticket = ticket_of(cluster, decode, OF_THE_DEAD)
        wire.cut()
        child.tell(ticket)
        wire.wait_loss()
        child.stop() if does_wake else child.kill()
        wait_until(lambda: has_failed(decode, ticket), "its silence is noticed")
        assert_serves(decode, cluster, other, OF_OTHERS)
        wait_until(lambda: Released(ticket.lease_token) in decode.events, "its blocks are back")
        assert_all_slots_are_free(decode)
        decode.assert_books_are_empty()
        card = card_of(cluster, decode)
        assert card.ring is not None
        decode.pool[:] = card.ring.memory.bytes()[:] = NEW_OWNER
        wire.heal()
        if does_wake:
            child.go_on()
            assert isinstance(child.wait_answer(), TransferEnded)
        assert np.all(decode.pool == NEW_OWNER)
        assert np.all(card.ring.memory.bytes() == NEW_OWNER)
    assert_serves(decode, cluster, other)
