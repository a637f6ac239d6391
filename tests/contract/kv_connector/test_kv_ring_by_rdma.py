"""Rings that are read by RDMA: reads that fail or land late, or whose transfer ends meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.contract import Landed, LandingFailed, Released, Ticket, TransferEnded
from tests.support.kv.fake_engine import FakeEngine
from tests.support.kv.kinds import CardRdmaKind
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

NUM_SLOTS = 20
NEW_OWNER = 0xAB


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.closing(cluster_of("card-rdma")) as cluster:
        assert isinstance(cluster.kind, CardRdmaKind)
        cluster.kind.num_slots = NUM_SLOTS
        yield cluster
        engine_of(cluster).is_held = False
        engine_of(cluster).let_go.release(1000)


def engine_of(cluster: Cluster) -> FakeEngine:
    assert isinstance(cluster.kind, CardRdmaKind)
    return cluster.kind.engine


def lanes_of(node: Node) -> dict[str, str]:
    return dict(node.connector.statistics().lanes)


def assert_all_slots_are_free(*nodes: Node) -> None:
    for node in nodes:
        ring = node.connector.ring
        assert ring is not None
        for slots in (ring.sending, ring.receiving):
            wait_until(lambda slots=slots: (slots.num_lent, slots.num_waiting) == (0, 0))  # type: ignore[misc]


def assert_lands(cluster: Cluster, prefill: Node, decode: Node, lane: str = "rdma_read") -> None:
    blocks = list(np.random.default_rng(7).permutation(12))
    ticket = cluster.ticket(decode, range(12))
    send(prefill, decode, ticket, blocks)
    wait_until(lambda: Landed(ticket.lease_token, commit_for(ticket)) in decode.events)
    wait_until(lambda: TransferEnded(ticket.lease_token, None) in prefill.events)
    assert np.array_equal(decode.pool, prefill.pool[:, :, blocks])
    assert lanes_of(prefill)[decode.incarnation.node_id] == lane
    assert_all_slots_are_free(prefill, decode)


def hold_a_read(cluster: Cluster) -> tuple[Node, Node, Ticket]:
    """Start a whole handoff whose first read is held."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    engine_of(cluster).is_held = True
    ticket = cluster.ticket(decode, range(12))
    send(prefill, decode, ticket, range(12))
    wait_until(lambda: engine_of(cluster).num_under_way)
    return prefill, decode, ticket


@pytest.mark.parametrize("verify", ["auto", "commit", "off"])
def test_a_handoff_goes_on_over_zmq_when_a_read_fails(cluster: Cluster, verify: str) -> None:
    """Nothing of it is lost, nothing ends, and the pair does without RDMA for a while."""
    prefill, decode = (cluster.node(name, verify=verify) for name in "pd")
    assert_lands(cluster, prefill, decode)
    engine_of(cluster).num_to_lose = 1
    assert_lands(cluster, prefill, decode, lane="zmq")
    statistics = decode.connector.statistics()
    assert statistics.frames_dropped["unread"] >= 1
    assert prefill.connector.statistics().measured.fallbacks["rdma_read", "not_agreed"] == 1
    assert_lands(cluster, prefill, decode, lane="zmq")
    assert_ended_once(prefill, decode)


def test_a_read_that_lands_late_reaches_no_slot(cluster: Cluster) -> None:
    """Its slots have held the pieces of other transfers since, and hold some now."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    assert_lands(cluster, prefill, decode)
    engine_of(cluster).num_to_lose = 2
    assert_lands(cluster, prefill, decode, lane="zmq")
    assert engine_of(cluster).num_lost
    (ring,) = (ring for node, ring in rings(cluster).items() if node == "d")
    ring[:] = NEW_OWNER
    assert engine_of(cluster).land_late() == 0
    assert np.all(ring == NEW_OWNER)
    other = cluster.node("other")
    assert_ended_once(prefill, decode, other)


def rings(cluster: Cluster) -> dict[str, np.ndarray]:
    """Return the bytes of the ring of each node that has used it."""
    found = {}
    for node in cluster.nodes:
        assert isinstance(cluster.kind, CardRdmaKind)
        ring = cluster.kind.card(node.pool).ring
        if ring is not None:
            found[node.incarnation.node_id] = ring.memory.bytes()
    return found


@pytest.mark.covers("F14", "F56")
@pytest.mark.parametrize("how", ["revoke", "abort", "the sender closes"])
def test_what_ends_in_the_middle_of_a_read_keeps_blocks_and_slots_to_its_end(
    cluster: Cluster, how: str
) -> None:
    prefill, decode, ticket = hold_a_read(cluster)
    if how == "revoke":
        decode.connector.revoke(ticket.lease_token)
    elif how == "abort":
        prefill.connector.abort(ticket.lease_token)
    else:
        prefill.connector.close()
    wait_until(lambda: decode.connector.statistics().blocks_quarantined == 12)
    wait_until(lambda: prefill.events)
    error_of(prefill.events[0])
    before = decode.pool.copy()
    with pytest.raises(ValueError, match="target block 0 was not released yet"):
        decode.connector.expect(cluster.ticket(decode, [0]), sender_deadline_s=30)
    engine_of(cluster).is_held = False
    engine_of(cluster).let_go.release(1000)
    wait_until(lambda: Released(ticket.lease_token) in decode.events)
    assert not any(isinstance(event, Landed) for event in decode.events)
    if how == "the sender closes":
        assert np.array_equal(decode.pool, before), "its memory is not registered any more"
        assert_all_slots_are_free(decode)
    else:
        assert_all_slots_are_free(prefill, decode)
        assert_lands(cluster, prefill, decode)


def test_a_receiver_that_ends_in_the_middle_of_a_read(cluster: Cluster) -> None:
    prefill, decode, ticket = hold_a_read(cluster)
    closing_lets_go = engine_of(cluster)
    closing_lets_go.is_held = False
    closing_lets_go.let_go.release(1000)
    decode.connector.close()
    wait_until(lambda: prefill.events)
    assert {type(event) for event in decode.events} <= {LandingFailed, Released, Landed}
    assert decode.events[-1].lease_token == ticket.lease_token
    assert_all_slots_are_free(prefill)
    assert_lands(cluster, prefill, cluster.node("e"))


def test_one_peer_that_fails_does_not_disturb_reads_from_another(cluster: Cluster) -> None:
    assert isinstance(cluster.kind, CardRdmaKind)
    cluster.kind.num_slots = 8 * NUM_SLOTS
    prefill, decode = cluster.node("p"), cluster.node("d")
    engine = engine_of(cluster)
    engine.is_held = True
    ticket = cluster.ticket(decode, range(6))
    send(prefill, decode, ticket, range(6))
    wait_until(lambda: engine.num_under_way)
    engine.is_held = False
    engine.num_to_lose = 1
    other = cluster.node("q")
    beside = cluster.ticket(decode, range(6, 12))
    send(other, decode, beside, range(6))
    wait_until(lambda: engine.num_lost)
    engine.let_go.release(1000)
    wait_until(lambda: len([one for one in decode.events if isinstance(one, Landed)]) == 2)
    assert lanes_of(prefill) == {"d": "rdma_read"}
    wait_until(lambda: lanes_of(other) == {"d": "zmq"})
    assert np.array_equal(decode.pool[:, :, :6], prefill.pool[:, :, :6])
    assert np.array_equal(decode.pool[:, :, 6:], other.pool[:, :, :6])
    assert engine.land_late() == 0
    assert_all_slots_are_free(prefill, other, decode)
    assert_ended_once(prefill, other, decode)


def test_an_earlier_release_does_not_know_the_lane(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its WELCOME chooses another one."""
    decode = cluster.node("d")
    monkeypatch.setattr("kv_transfer.connector.receiving_end.LANES_BY_SPEED", ("shm", "zmq"))
    prefill = cluster.node("p")
    assert_lands(cluster, prefill, decode, lane="zmq")
