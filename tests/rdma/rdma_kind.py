"""Connectors whose bytes go by RDMA, for the contract suite and the tests here."""

from __future__ import annotations

from collections.abc import Sequence

from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import Bytes, host_pool
from kv_transfer.lanes.rdma.mooncake_engine import MooncakeEngine
from kv_transfer.lanes.rdma.rdma_lane import RdmaLane
from kv_transfer.lanes.rdma.slabs import slabbed
from tests.rdma.devices import engine_of, shared_pool
from tests.support.kv.kinds import CardRdmaKind, ZmqKind

# As many blocks in a slab as the fake lane has, in the contract suite's pools.
MAX_SLABS = 3


class RdmaRingKind(CardRdmaKind):
    """Pools on cards, whose rings are read by RDMA. Engines are as those of `RdmaKind`."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._first = first

    def next_engine(self) -> MooncakeEngine:
        return engine_of(self._first + len(self.made))


class RdmaKind(ZmqKind):
    """Frames over TCP, bytes by RDMA. Nodes are on the engines of `first`, `first + 1` …"""

    lane = "rdma"
    is_one_sided = True

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._first = first
        self._made: list[RdmaLane] = []
        self._engine_of: dict[int, tuple[MooncakeEngine, KVLayout]] = {}

    def pool(self, layout: KVLayout, num_blocks: int) -> Bytes:
        return shared_pool(layout, num_blocks)

    def lanes(self, pool: Bytes, layout: KVLayout) -> Sequence[Lane]:
        engine = engine_of(self._first + len(self._made))
        self._engine_of[pool.ctypes.data] = engine, layout
        self._made.append(RdmaLane(host_pool(pool, layout), engine, max_slabs=MAX_SLABS))
        return self._made[-1:]

    def close(self) -> None:
        super().close()
        for lane in self._made:
            lane.close()  # Also where making its connector failed.

    def unregister(self, pool: Bytes) -> None:
        """Take the memory keys of a node's pool away, behind its lane's back."""
        engine, layout = self._engine_of[pool.ctypes.data]
        slabs = slabbed(host_pool(pool, layout).shape, max_slabs=MAX_SLABS)
        for slab in range(slabs.num_slabs):
            for offset, _ in slabs.regions(slab):
                engine.unregister(pool.ctypes.data + offset)
