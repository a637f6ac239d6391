"""Connections of the simulator on lanes on which nodes read or write the memory of others."""

from __future__ import annotations

import pytest

from common.errors import InternalError
from common.ids import AttemptId, Incarnation
from engine.core.blocks.block_pool import BlockPool, BlockUse
from kv_transfer.contract import (
    Commit,
    ConnectorFailed,
    KVEvent,
    Landed,
    Released,
    Ticket,
    TransferEnded,
)
from kv_transfer.shared.limits import Limits
from simulator.faults.contents import NUM_LAYERS, KVMemory
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.kv.end import KVEnd
from simulator.faults.kv.wires import KVWires
from simulator.faults.node.faulty_node import layout_of
from simulator.faults.shape import LANES
from simulator.timeline import Timeline

BLOCK_SIZE, NUM_BLOCKS = 4, 8
SOURCES = (4, 5)
LATENCY_S = 1e-3
LEASE_TOKEN = 7


class Pair:
    """A node that sends and one that receives, and what their connectors say."""

    def __init__(self, lane: str = "rdma") -> None:
        self.timeline, self.paths = Timeline(), Paths()
        self.wires = KVWires(self.timeline, self.paths, LATENCY_S, lane=lane)
        self.pools = [BlockPool(NUM_BLOCKS), BlockPool(NUM_BLOCKS)]
        self.said: list[list[KVEvent | ConnectorFailed]] = [[], []]
        self.memories = [KVMemory(NUM_BLOCKS, 0, BLOCK_SIZE) for _ in range(2)]
        self.sender, self.receiver = (self._end(number) for number in range(2))
        for block in SOURCES:
            for of_layer in self.memories[0].slots:
                of_layer[block] = (block,) * BLOCK_SIZE
        self.targets = self.pools[1].allocate(len(SOURCES), BlockUse.RECEIVING)
        self.ticket = Ticket(
            attempt=AttemptId("r", 1),
            decode_node=self.receiver.me,
            kv_endpoint=self.receiver.me.node_id,
            lease_token=LEASE_TOKEN,
            generation=1,
            target_block_ids=tuple(self.targets),
            num_cached_tokens=0,
            fingerprint=layout_of(BLOCK_SIZE).fingerprint,
            lease_s=30.0,
        )

    def _end(self, number: int) -> KVEnd:
        return KVEnd(
            Incarnation(("prefill", "decode")[number], 1),
            ProcessClock(self.timeline),
            self.wires,
            layout_of(BLOCK_SIZE),
            self.memories[number],
            self.pools[number],
            Limits(),
            self.said[number].append,
        )

    def open(self) -> None:
        self.receiver.expect(self.ticket, sender_deadline_s=30.0)
        self.sender.open(self.ticket, deadline_s=60.0)
        self.pass_time(10 * LATENCY_S)

    def push(self, layer: int) -> None:
        self.sender.push(LEASE_TOKEN, layer=layer, ordinals=[0, 1], source_blocks=SOURCES)

    def commit(self) -> None:
        self.sender.commit(LEASE_TOKEN, Commit(num_tokens=2 * BLOCK_SIZE, first_token_id=3))

    def pass_time(self, span_s: float) -> None:
        ends_s = self.timeline.now_s() + span_s
        self.timeline.at(ends_s, lambda: None)
        self.timeline.run(until=lambda: self.timeline.now_s() >= ends_s)

    def has_written(self, layer: int) -> bool:
        """Whether the targets hold what the sender sends."""
        sent = self.memories[0].read(layer, SOURCES)
        return self.memories[1].read(layer, self.targets) == sent


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


def test_a_write_into_a_block_that_belongs_to_another_is_found() -> None:
    pair = Pair()
    pair.open()
    pair.pools[1].start_running(pair.targets)
    pair.push(0)
    with pytest.raises(InternalError, match="that it may reuse"):
        pair.pass_time(10 * LATENCY_S)
