"""A pool divided into slabs, and the ranges of bytes that a chunk is written as.

A pool is `[num_layers, 2, num_blocks, piece_bytes]`; 2 is keys, values. A slab is a range of block
ids in every layer, so in memory it is `2 * num_layers` regions of equal length:

                      block 0 ┌─ slab 0 ─┬─ slab 1 ─┬─ slab 2 ─┐
      layer 0   keys          │  region  │  region  │  region  │
                values        │  region  │  region  │  region  │
      layer 1   keys          │  region  │  …

Each region has a memory key of its own, so a slab can be fenced while the others are written. It is
then written at another address than before, as if the whole pool had moved there: so each slab has
a `start`. A written range lies in one region at each end.

The number of slabs: with more of them a slab that moves needs less locked memory beside what it
has, and fewer writers have to look a key up again. But every write searches a list for its region,
and a peer fetches that list as a whole (a mebibyte at most, 0.2 to 0.3 kB for each region). So
there are at most `MAX_REGIONS`, and those of one slab more while it moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.core.block_arrays import Blocks
from kv_transfer.core.chunks import Chunk

MAX_REGIONS = 1024
MAX_SLABS = 16

Ranges = npt.NDArray[np.uint64]
"""`[num_ranges, 3]`: address here, address there, number of bytes."""


@dataclass(frozen=True, slots=True)
class SlabbedPool:
    """The shape of a registered pool. Offsets are bytes from its start."""

    num_layers: int
    num_blocks: int
    piece_bytes: int
    blocks_per_slab: int

    @property
    def num_slabs(self) -> int:
        return -(-self.num_blocks // self.blocks_per_slab)

    def offset(self, layer: int, kind: int, block: int) -> int:
        """Return the offset of a block's keys (`kind` 0) or values (1)."""
        return ((2 * layer + kind) * self.num_blocks + block) * self.piece_bytes

    def regions(self, slab: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of each region of a slab; the last slab may be smaller."""
        first = slab * self.blocks_per_slab
        count = min(self.blocks_per_slab, self.num_blocks - first)
        for layer in range(self.num_layers):
            for kind in (0, 1):
                yield self.offset(layer, kind, first), count * self.piece_bytes


@dataclass(frozen=True, slots=True)
class PlacedPool:
    """A pool and the addresses at which its slabs can be written: their starts."""

    pool: SlabbedPool
    starts: tuple[int, ...]

    def addresses(self, layer: int, blocks: Blocks) -> npt.NDArray[np.uint64]:
        """Return the addresses of the blocks' keys and values: `[num_blocks, 2]`."""
        starts = np.array(self.starts, np.uint64)[blocks // self.pool.blocks_per_slab]
        keys, values = (np.uint64(self.pool.offset(layer, kind, 0)) for kind in (0, 1))
        keys_at = starts + keys + np.uint64(self.pool.piece_bytes) * blocks.astype(np.uint64)
        return np.stack((keys_at, keys_at + (values - keys)), axis=1)


def slabbed(
    num_layers: int, num_blocks: int, piece_bytes: int, *, max_slabs: int = MAX_SLABS
) -> SlabbedPool:
    """Return a pool in as many slabs as the bounds allow."""
    num_slabs = max(1, min(max_slabs, MAX_REGIONS // (2 * num_layers), num_blocks))
    return SlabbedPool(num_layers, num_blocks, piece_bytes, -(-num_blocks // num_slabs))


def ranges_of(
    chunk: Chunk, target_blocks: Blocks, source: PlacedPool, target: PlacedPool
) -> Ranges:
    """Return the ranges that write block `i` of the chunk to `target_blocks[i]`.

    Blocks that are adjacent in both pools, and in one slab of each, are one range.
    """
    firsts = _firsts(chunk.source_blocks, target_blocks, source.pool, target.pool)
    counts = np.diff(firsts, append=len(chunk))
    ranges = np.empty((firsts.size, 2, 3), np.uint64)
    ranges[:, :, 0] = source.addresses(chunk.layer, chunk.source_blocks[firsts])
    ranges[:, :, 1] = target.addresses(chunk.layer, target_blocks[firsts])
    ranges[:, :, 2] = counts[:, None] * source.pool.piece_bytes
    return ranges.reshape(-1, 3)


def _firsts(
    sources: Blocks, targets: Blocks, source: SlabbedPool, target: SlabbedPool
) -> npt.NDArray[np.intp]:
    """Return the index of the first block of each run that can be written as one range."""
    is_first = np.ones(sources.size, bool)
    rest = is_first[1:]
    rest[:] = sources[1:] - sources[:-1] != 1
    rest |= targets[1:] - targets[:-1] != 1
    rest |= sources[1:] % source.blocks_per_slab == 0
    rest |= targets[1:] % target.blocks_per_slab == 0
    return np.flatnonzero(is_first)
