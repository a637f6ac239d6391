"""Connections of the simulator on lanes on which nodes read or write the memory of others."""

from __future__ import annotations

import pytest

from kv_transfer.contract import Landed, Released, TransferEnded
from simulator.faults.contents import NUM_LAYERS
from simulator.faults.shape import LANES
from tests.unit.simulator.faults.kv.pairs import LATENCY_S, LEASE_TOKEN, SOURCES, Pair


@pytest.mark.parametrize("lane", LANES)
def test_blocks_land_on_every_lane(lane: str) -> None:
    pair = Pair(lane)
    pair.open()
    for layer in range(NUM_LAYERS):
        pair.push(layer)
    pair.commit()
    pair.pass_time(100 * LATENCY_S)
    assert all(pair.has_written(layer) for layer in range(NUM_LAYERS))
    assert [type(one) for one in pair.said[1]] == [Landed]
    assert pair.said[0] == [TransferEnded(LEASE_TOKEN, None)]
    assert pair.sender.is_idle
    assert pair.receiver.is_idle
    lanes = {session.lane for session in pair.receiver.receiver.sessions.all()}
    assert lanes == {lane}


def test_what_could_not_be_read_is_sent_again_on_another_lane() -> None:
    pair = Pair("rdma_read")
    pair.open()
    pair.push(0)
    pair.pass_time(20 * LATENCY_S)
    pair.push(1)
    pair.commit()
    pair.pass_time(2.5 * LATENCY_S)
    pair.wires.flights.break_between("prefill", "decode")
    pair.pass_time(30.0)
    assert [type(one) for one in pair.said[1]] == [Landed]
    assert pair.sender.is_idle
    assert not pair.sender.holds_slots
    assert pair.receiver.is_idle
    assert not pair.receiver.holds_slots


def test_slots_that_were_given_back_hold_nothing_of_use() -> None:
    """So a read that comes later is found, although nobody has the slots yet."""
    pair = Pair("rdma_read")
    pair.open()
    pair.push(0)
    pair.pass_time(100 * LATENCY_S)
    assert pair.has_written(0)
    sent = pair.memories[0].read(0, SOURCES)
    for end in (pair.sender, pair.receiver):
        assert not end.holds_slots
        assert end.ring is not None
        for one in sent:
            assert one not in end.ring.slots


def test_slots_of_a_read_from_a_dead_node_come_back() -> None:
    pair = Pair("rdma_read")
    pair.open()
    pair.push(0)
    pair.paths.cut("prefill", "decode")
    pair.paths.cut("decode", "prefill")
    pair.pass_time(20 * LATENCY_S)
    pair.sender.clock.kill()
    pair.wires.leave(pair.sender)
    pair.pass_time(60.0)
    assert pair.said[1][-1] == Released(LEASE_TOKEN)
    assert pair.receiver.is_idle
    assert not pair.receiver.holds_slots


def test_the_copies_of_a_dead_nodes_memory_are_over_before_its_blocks_are_released() -> None:
    pair = Pair("shm")
    pair.open()
    pair.push(0)
    pair.pass_time(1.1 * LATENCY_S)
    pair.sender.clock.kill()
    pair.receiver.revoke(LEASE_TOKEN)
    assert pair.said[1] == []
    pair.pass_time(20 * LATENCY_S)
    assert pair.has_written(0)
    assert pair.said[1] == [Released(LEASE_TOKEN)]


def test_what_is_sent_to_a_landing_that_is_over_is_written_until_its_sender_hears_of_it() -> None:
    pair = Pair()
    pair.open()
    pair.push(0)
    pair.pass_time(10 * LATENCY_S)
    pair.push(1)
    pair.receiver.revoke(LEASE_TOKEN)
    assert pair.receiver.receiver.quarantined.keys() == {LEASE_TOKEN}
    steps = 0
    while not pair.has_written(1):  # Nobody can refuse it.
        assert pair.said[1] == []
        steps += 1
        assert steps < 200
        pair.pass_time(0.1 * LATENCY_S)
    pair.pass_time(20 * LATENCY_S)
    assert pair.said[1] == [Released(LEASE_TOKEN)]
    assert pair.receiver.is_idle
    assert pair.sender.is_idle


def test_the_blocks_of_a_dead_sender_are_free_when_the_pool_has_moved() -> None:
    pair = Pair()
    pair.open()
    pair.push(0)
    pair.pass_time(10 * LATENCY_S)
    pair.sender.clock.kill()
    pair.wires.leave(pair.sender)
    pair.pass_time(60.0)
    assert pair.said[1][-1] == Released(LEASE_TOKEN)
    assert pair.receiver.is_idle


def test_a_sender_that_hears_nothing_writes_nothing_any_more_when_the_pool_has_moved() -> None:
    pair = Pair()
    pair.open()
    pair.push(0)
    pair.pass_time(10 * LATENCY_S)
    pair.paths.cut("decode", "prefill")
    pair.receiver.revoke(LEASE_TOKEN)
    (session,) = pair.receiver.receiver.sessions.all()
    pair.receiver.receiver.sessions.drop(session.id)
    pair.receiver.wake()
    assert pair.said[1] == [Released(LEASE_TOKEN)]
    pair.push(1)
    pair.pass_time(10 * LATENCY_S)
    assert pair.has_written(0)
    assert not pair.has_written(1)
