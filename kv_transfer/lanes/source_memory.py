"""What a connector sends: the blocks of its pool and, numbered behind them, those of other memory.

A node keeps prefixes in host memory beside its pool. They are sent from there: block `n` of it is
number `num_pool_blocks + n` of a `push`, of a chunk and, on a lane that names source blocks, of a
frame. A chunk has blocks of one memory. Lanes of a node with a card see its ring in place of the
pool, so for them the numbers of host memory are behind those of the slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kv_transfer.lanes.pool_memory import Pool
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk


class SourceMemory:
    """`pool` and, if a node has it, `host` behind it: whole blocks of the same layout."""

    def __init__(self, pool: Pool, host: Pool | None = None) -> None:
        """Raise `ValueError` for other memory that is not the host's, or of another layout."""
        if host is not None:
            host.check_on_host("what is sent beside a pool")
            if host.shape.layers != pool.shape.layers:
                raise ValueError("blocks of two layouts cannot be sent as those of one pool")
        self.pool, self._host = pool, host
        self.num_pool_blocks = pool.num_blocks
        self.num_host_blocks = 0 if host is None else host.num_blocks

    @property
    def num_blocks(self) -> int:
        """The blocks of both."""
        return self.num_pool_blocks + self.num_host_blocks

    def place(self, chunk: LayerChunk) -> tuple[Pool, LayerChunk]:
        """Return the memory that a chunk is in, and the chunk as one of that memory alone."""
        pool, blocks = self.place_blocks(chunk.source_blocks)
        return pool, chunk if pool is self.pool else replace(chunk, source_blocks=blocks)

    def place_blocks(self, blocks: Blocks) -> tuple[Pool, Blocks]:
        """Return the memory that has these blocks, all of one memory, and their numbers there."""
        if self._host is None or int(blocks[0]) < self.num_pool_blocks:
            return self.pool, blocks
        return self._host, blocks - np.uint32(self.num_pool_blocks)
