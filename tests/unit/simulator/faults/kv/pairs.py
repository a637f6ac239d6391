"""Two connectors of the simulator, of a node that sends and one that receives."""

from __future__ import annotations

from common.ids import AttemptId, Incarnation
from engine.core.blocks.block_pool import BlockPool, BlockUse
from kv_transfer.contract import Commit, ConnectorFailed, KVEvent, Ticket
from kv_transfer.shared.limits import Limits
from simulator.faults.contents import KVMemory
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.kv.end import KVEnd
from simulator.faults.kv.wires import KVWires
from simulator.faults.node.faulty_node import layout_of
from simulator.timeline import Timeline

BLOCK_SIZE, NUM_BLOCKS = 4, 8
SOURCES = (4, 5)
LATENCY_S = 1e-3
LEASE_TOKEN = 7


class Pair:
    """A node that sends and one that receives, and what their connectors say."""

    def __init__(self, lane: str = "rdma", seed: int = 0) -> None:
        self.timeline, self.paths = Timeline(), Paths()
        self.wires = KVWires(self.timeline, self.paths, LATENCY_S, lane=lane, seed=seed)
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
