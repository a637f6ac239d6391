"""Lanes without connectors: what a write does to a pool, and what a fence does to a write."""

from __future__ import annotations

import threading
import time

import numpy as np

from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.lane import Broken, Ready
from kv_transfer.lanes.pool_memory import host_pool
from kv_transfer.lanes.rdma.rdma_lane import RdmaLane
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from tests.rdma.devices import WAIT_S, engine_of, shared_pool

LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=8, head_dim=64, block_size=32, dtype="float32"
)
NUM_BLOCKS = 16
BLOCKS_PER_SLAB = 4
ALL_BLOCKS = tuple(range(NUM_BLOCKS))
ALL_SLABS = range(NUM_BLOCKS // BLOCKS_PER_SLAB)


class End:
    """A pool of 16 blocks in four slabs, filled with `fill`, on the `number`th engine."""

    def __init__(self, number: int, fill: int) -> None:
        self.pool = shared_pool(LAYOUT, NUM_BLOCKS)
        self.pool[:] = fill
        pool = host_pool(self.pool, LAYOUT)
        self.lane = RdmaLane(pool, engine_of(number), max_slabs=len(ALL_SLABS))
        self.peer = Peer(f"tcp://127.0.0.1:{number}", Incarnation(f"n{number}", 1))
        self._changed = threading.Event()
        self.lane.attach(self._changed.set)

    def connect(self, target: End) -> None:
        offer = self.lane.offer(target.peer)
        assert offer is not None
        reply = target.lane.open(b"session", offer)
        assert reply is not None
        self.lane.accept(target.peer, reply)

    def write(self, target: End, blocks: tuple[int, ...] = ALL_BLOCKS, layer: int = 0) -> None:
        """Write the same blocks there as here, and send a header behind them."""
        numbers = as_blocks(blocks)
        self.lane.write(target.peer, LayerChunk(layer, numbers, numbers), numbers)
        self.lane.send_after(target.peer, [memoryview(b"header")])

    def wait_ready(self) -> Ready | Broken:
        """Wait for the next item that becomes ready; there must be only one."""
        deadline_at_s = time.monotonic() + WAIT_S
        while not (ready := self.lane.take_ready()):
            assert self._changed.wait(deadline_at_s - time.monotonic()), "nothing became ready"
            self._changed.clear()
        (one,) = ready
        return one

    def holds(self, value: int, blocks: tuple[int, ...] = ALL_BLOCKS, layer: int = 0) -> bool:
        """Return whether all bytes of these blocks are `value`."""
        return bool(np.all(self.pool[layer, :, list(blocks)] == value))
