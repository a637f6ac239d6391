"""Cards whose KV passes through rings of few slots: who waits, and when slots are free again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from common.errors import HandoffFailed
from kv_transfer.connector.card_ring import CardRing
from kv_transfer.contract import Landed, Released, Ticket, TransferEnded
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames
from tests.contract.kv_connector.raw_sender import RawSender
from tests.support.clocks.manual_clock import ManualClock
from tests.support.engine.fake_card import FakeCard
from tests.support.kv.kinds import CardKind
from tests.support.kv.kv_cluster import (
    Cluster,
    Node,
    assert_ended_once,
    cluster_of,
    commit_for,
    error_of,
    send,
    wait_until,
)
from tests.support.kv.links import Link

# A quarter is for receiving, which takes one frame: of two blocks over zmq and by RDMA, else of
# five.
FEW = {"card-zmq": 8, "card-shm": 20, "card-rdma": 8, "card-zmq-2": 20}


@pytest.fixture(params=list(FEW))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with contextlib.closing(ring_cluster(request.param)) as cluster:
        yield cluster
        for card in kind_of(cluster).cards.values():
            card.copier.release()


@pytest.fixture
def zmq_cluster() -> Iterator[Cluster]:
    with contextlib.closing(ring_cluster("card-zmq")) as cluster:
        yield cluster
        for card in kind_of(cluster).cards.values():
            card.copier.release()


def ring_cluster(name: str) -> Cluster:
    cluster = cluster_of(name)
    kind_of(cluster).num_slots = FEW[name]
    return cluster


def kind_of(cluster: Cluster) -> CardKind:
    assert isinstance(cluster.kind, CardKind)
    return cluster.kind


def card_of(cluster: Cluster, node: Node) -> FakeCard:
    return kind_of(cluster).card(node.pool)


def ring_of(node: Node) -> CardRing:
    ring = node.connector.ring
    assert ring is not None
    return ring


def assert_all_slots_are_free(*nodes: Node) -> None:
    for node in nodes:
        for slots in (ring_of(node).sending, ring_of(node).receiving):
            wait_until(lambda slots=slots: (slots.num_lent, slots.num_waiting) == (0, 0))  # type: ignore[misc]


def assert_lands(cluster: Cluster, prefill: Node, decode: Node) -> None:
    """Hand over as many blocks as the pool has, which need all slots again and again."""
    blocks = list(np.random.default_rng(5).permutation(12))
    ticket = cluster.ticket(decode, range(12))
    send(prefill, decode, ticket, blocks)
    wait_until(lambda: Landed(ticket.lease_token, commit_for(ticket)) in decode.events)
    wait_until(lambda: TransferEnded(ticket.lease_token, None) in prefill.events)
    assert np.array_equal(decode.pool, prefill.pool[:, :, blocks])
    assert_all_slots_are_free(prefill, decode)


@pytest.mark.parametrize("verify", ["block", "commit", "off"])
def test_more_pieces_than_slots(cluster: Cluster, verify: str) -> None:
    prefill, decode = (cluster.node(name, verify=verify) for name in "pd")
    assert_lands(cluster, prefill, decode)
    assert_ended_once(prefill, decode)


def test_many_transfers_at_once_in_both_directions(cluster: Cluster) -> None:
    """Each node sends to the others and receives from them, with fewer slots than frames."""
    nodes = [cluster.node(name) for name in "abc"]
    before = [node.pool.copy() for node in nodes]
    wanted = [one.copy() for one in before]
    tickets: list[Ticket] = []
    for sender in range(3):
        for receiver in range(3):
            if sender == receiver:
                continue
            targets = [3 * sender + place for place in range(3)]
            sources = [9, 10, 11]
            wanted[receiver][:, :, targets] = before[sender][:, :, sources]
            tickets.append(cluster.ticket(nodes[receiver], targets))
            send(nodes[sender], nodes[receiver], tickets[-1], sources)
    for node in nodes:
        wait_until(lambda node=node: len(node.events) == 4)  # type: ignore[misc]
    landed = {event.lease_token for node in nodes for event in node.events
              if isinstance(event, Landed)}  # fmt: skip
    assert landed == {ticket.lease_token for ticket in tickets}
    for node, content in zip(nodes, wanted, strict=True):
        assert np.array_equal(node.pool, content)
    assert_all_slots_are_free(*nodes)
    assert_ended_once(*nodes)


def test_a_receiver_whose_slots_are_taken_holds_its_sender_back(cluster: Cluster) -> None:
    """Nothing fails, no matter how long, and all of it lands later."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    card_of(cluster, decode).copier.hold()
    ticket = cluster.ticket(decode, range(12))
    send(prefill, decode, ticket, range(12))
    receiving = ring_of(decode).receiving
    wait_until(lambda: receiving.num_waiting)
    assert receiving.num_lent <= receiving.count
    assert decode.events == prefill.events == []
    card_of(cluster, decode).copier.release()
    wait_until(lambda: decode.events and prefill.events)
    assert decode.events == [Landed(ticket.lease_token, commit_for(ticket))]
    assert np.array_equal(decode.pool, prefill.pool)
    assert_all_slots_are_free(prefill, decode)
    assert_ended_once(prefill, decode)


@pytest.mark.parametrize("is_held_at", ["the sender's card", "the receiver's card"])
@pytest.mark.parametrize("how", ["abort", "revoke"])
def test_a_transfer_that_ends_frees_its_slots(cluster: Cluster, how: str, is_held_at: str) -> None:
    """Whether it waits for slots, is being copied to them, was sent, or waits for the card."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    held = card_of(cluster, prefill if is_held_at == "the sender's card" else decode).copier
    held.hold()
    ticket = cluster.ticket(decode, range(12))
    send(prefill, decode, ticket, range(12))
    held.wait_under_way(1)
    if is_held_at == "the sender's card":
        wait_until(lambda: ring_of(prefill).sending.num_lent)
    else:
        wait_until(lambda: ring_of(decode).receiving.num_waiting)
    if how == "abort":
        prefill.connector.abort(ticket.lease_token)
    else:
        decode.connector.revoke(ticket.lease_token)
    wait_until(lambda: prefill.events)
    assert isinstance(error_of(prefill.events[0]), HandoffFailed)
    held.release()
    wait_until(lambda: Released(ticket.lease_token) in decode.events)
    assert_all_slots_are_free(prefill, decode)
    assert_lands(cluster, prefill, decode)


def test_a_transfer_goes_on_over_the_next_connection(cluster: Cluster) -> None:
    """What was in flight keeps its slots: the first connection's bytes may still be read."""
    prefill, decode = cluster.node("p", num_blocks=12), cluster.node("d")
    port = int(decode.connector.endpoint.rpartition(":")[2])
    with contextlib.closing(Link(port)) as link:
        ticket = replace(cluster.ticket(decode, range(4)), kv_endpoint=f"tcp://{link.address}")
        card_of(cluster, decode).copier.hold()
        send(prefill, decode, ticket, [8, 9, 10, 11])
        card_of(cluster, decode).copier.wait_under_way(1)
        sending = ring_of(prefill).sending
        link.refuse()
        link.mend()
        card_of(cluster, decode).copier.release()
        wait_until(lambda: decode.events and prefill.events)
        assert decode.events == [Landed(ticket.lease_token, commit_for(ticket))]
        assert np.array_equal(decode.pool[:, :, :4], prefill.pool[:, :, 8:])
        wait_until(lambda: sending.num_lent == 0)
    assert_all_slots_are_free(prefill, decode)
    assert_ended_once(prefill, decode)


def test_slots_of_a_node_that_is_gone_serve_the_others(zmq_cluster: Cluster) -> None:
    """A decode node that takes nothing holds them until it is given up."""
    stuck, decode = zmq_cluster.node("stuck"), zmq_cluster.node("d")
    kind_of(zmq_cluster).num_slots = 5  # Four for sending: what one node may have unacknowledged.
    clock, limits = ManualClock(), Limits()
    prefill = zmq_cluster.node("p", clock=clock)
    sending = ring_of(prefill).sending
    card_of(zmq_cluster, stuck).copier.hold()
    port = int(stuck.connector.endpoint.rpartition(":")[2])
    with contextlib.closing(Link(port)) as link:
        lost = replace(zmq_cluster.ticket(stuck, range(12)), kv_endpoint=f"tcp://{link.address}")
        send(prefill, stuck, lost, range(12))
        wait_until(lambda: sending.num_lent == sending.count)
        link.refuse()
        for span_s in (limits.ping_interval_s, limits.answer_timeout_s / 2):
            clock.advance(span_s)  # A ping, which nobody answers.
            prefill.have_seen_the_time()
        ticket = zmq_cluster.ticket(decode, range(12))
        send(prefill, decode, ticket, range(12))
        wait_until(lambda: sending.num_waiting)
        assert decode.events == []
        clock.advance(limits.answer_timeout_s / 2)
        prefill.look_at_the_time()
        wait_until(lambda: decode.events)
    assert decode.events == [Landed(ticket.lease_token, commit_for(ticket))]
    assert np.array_equal(decode.pool, prefill.pool)
    assert_all_slots_are_free(prefill, decode)


def test_a_frame_of_more_blocks_than_there_are_slots_is_refused(zmq_cluster: Cluster) -> None:
    """Before any memory is touched; its connection is over, and others are served."""
    decode = zmq_cluster.node("d")
    ticket = zmq_cluster.ticket(decode, range(4))
    with contextlib.closing(RawSender(zmq_cluster, decode)) as rogue:
        decode.connector.expect(ticket, sender_deadline_s=30)
        rogue.send(frames.Begin(ticket.lease_token, ticket.generation))
        rogue.settle()
        untouched = decode.pool.copy()
        whole = frames.Data(
            seq=0,
            lease_token=ticket.lease_token,
            generation=ticket.generation,
            layer=0,
            ordinals=(0, 1, 2, 3),
            runs=(4,),
            source_blocks=(),
            sums=bytes(2 * 4 * frames.SUM_BYTES),
        )
        rogue.send(whole, *(rogue.pool[0, plane].reshape(-1).data for plane in (0, 1)))
        assert "DATA of 4 blocks: this node takes 2 at a time" in str(decode.wait_failed())
        assert any(isinstance(rogue.answer(), frames.Rejected) for _ in range(2))
    assert np.array_equal(decode.pool, untouched)
    decode.events.clear()
    assert_lands(zmq_cluster, zmq_cluster.node("p"), decode)
