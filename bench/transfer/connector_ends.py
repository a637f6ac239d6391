"""The project's connectors, used as the nodes use them."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence

from bench.transfer.ways import Span, now_s
from bench.transfer.workload import Memory
from common.ids import AttemptId, Incarnation
from kv_transfer.contract import Commit, ConnectorEvent, Landed, Ticket, TransferEnded
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import host_pool
from kv_transfer.lanes.rdma.peer_batches import Engine
from kv_transfer.lanes.rdma.rdma_lane import RdmaLane
from kv_transfer.lanes.rdma.slabs import Ranges
from kv_transfer.lanes.shm.shm_lane import ShmLane
from kv_transfer.zmq.connector import ZmqConnector
from kv_transfer.zmq.curve_keys import CurveKeys

_DEADLINE_S = 60.0
_PEER_TIMEOUT_S = 10.0  # A machine is busy during measurements.


class _End:
    """A connector and the events it emitted, each with the time of its arrival."""

    name: str

    def __init__(
        self,
        memory: Memory,
        lanes: Sequence[Lane] = (),
        keys: CurveKeys | None = None,
        kv_lanes: int = 1,
    ) -> None:
        self._events: queue.SimpleQueue[tuple[ConnectorEvent, float]] = queue.SimpleQueue()
        self.me = Incarnation(self.name, 1)
        self.workload = memory.workload
        self.connector = ZmqConnector(
            memory.pool,
            memory.workload.layout,
            self.me,
            self._on_event,
            peer_timeout_s=_PEER_TIMEOUT_S,
            lanes=lanes,
            keys=keys,
            kv_lanes=kv_lanes,
        )

    def _on_event(self, event: ConnectorEvent) -> None:
        self._events.put((event, now_s()))

    def wait_event(self) -> tuple[ConnectorEvent, float]:
        return self._events.get(timeout=_DEADLINE_S)

    def close(self) -> None:
        self.connector.close()


class ConnectorReceiver(_End):
    """A decode node's connector."""

    name = "decode"
    _tokens = itertools.count(1)

    def prepare(self, pattern: str) -> Ticket:
        return self.reserve(self.workload.target_blocks(pattern))

    def reserve(self, blocks: tuple[int, ...]) -> Ticket:
        """Open a landing in these blocks; return its ticket."""
        token = next(self._tokens)
        ticket = Ticket(
            attempt=AttemptId(f"bench-{token}", 0),
            decode_node=self.me,
            kv_endpoint=self.connector.endpoint,
            lease_token=token,
            generation=1,
            target_block_ids=blocks,
            num_cached_tokens=0,
            fingerprint=self.workload.layout.fingerprint,
            lease_s=_DEADLINE_S,
        )
        self.connector.expect(ticket, sender_deadline_s=_DEADLINE_S)
        return ticket

    def receive(self) -> Span:
        """Wait for the landing; `RuntimeError` when it failed."""
        event, at_s = self.wait_event()
        if not isinstance(event, Landed):
            raise RuntimeError(f"the landing failed: {event}")
        return Span(None, at_s)


class ConnectorSender(_End):
    """A prefill node's connector."""

    name = "prefill"

    def send(self, pattern: str, prepared: Ticket) -> Span:
        """Push and commit all layers; `RuntimeError` when the transfer failed."""
        token = prepared.lease_token
        layout, ordinals = self.workload.layout, range(self.workload.num_moved)
        blocks = self.workload.source_blocks(pattern)
        began_at_s = now_s()
        self.connector.open(prepared, deadline_s=_DEADLINE_S)
        for layer in range(layout.num_layers):
            self.connector.push(token, layer=layer, ordinals=ordinals, source_blocks=blocks)
        num_tokens = len(ordinals) * layout.block_size
        self.connector.commit(token, Commit(num_tokens=num_tokens, first_token_id=0))
        event, _ = self.wait_event()
        if not isinstance(event, TransferEnded) or event.error is not None:
            raise RuntimeError(f"the transfer failed: {event}")
        return Span(began_at_s, None)


def shm_receiver(memory: Memory, kv_lanes: int = 1) -> ConnectorReceiver:
    """Return a receiver that reads the shared pools of senders on this host."""
    return ConnectorReceiver(memory, [ShmLane(memory.workload.layout)], kv_lanes=kv_lanes)


def shm_sender(memory: Memory, kv_lanes: int = 1) -> ConnectorSender:
    """Return a sender whose pool is shared."""
    lane = ShmLane(memory.workload.layout, memory.shared)
    return ConnectorSender(memory, [lane], kv_lanes=kv_lanes)


def free_rdma_receiver(memory: Memory) -> ConnectorReceiver:
    """Return a receiver that is written by an RDMA engine whose writes cost nothing."""
    return ConnectorReceiver(memory, [_free_rdma_lane(memory)])


def free_rdma_sender(memory: Memory) -> ConnectorSender:
    """Return a sender that writes with such an engine."""
    return ConnectorSender(memory, [_free_rdma_lane(memory)])


class FreeEngine(Engine):
    """An RDMA engine whose writes take no time and move nothing: the connector's cost is left.

    It bounds what this code can reach on any network.
    """

    name = "free"

    def register(self, address: int, num_bytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def can_reach(self, peer_name: str) -> bool:
        return True

    def submit(self, peer_name: str, ranges: Ranges) -> int:
        return 1

    def submit_read(self, peer_name: str, ranges: Ranges) -> int:
        return 1

    def wait(self, batch: int) -> bool:
        return True


def _free_rdma_lane(memory: Memory) -> RdmaLane:
    return RdmaLane(host_pool(memory.pool, memory.workload.layout), FreeEngine())
