"""A pool divided into slabs, and the ranges of bytes that a chunk is written as.

A slab is a range of block ids in every layer, so in memory it is one region in each plane of each
layer (see `PoolShape`; here with two planes):

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

A ring is registered in two parts, each of which is one slab: the slots that others read, and those
that this node reads into.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.pool_shape import PoolShape

MAX_REGIONS = 1024
MAX_SLABS = 16

Ranges = npt.NDArray[np.uint64]
"""`[num_ranges, 3]`: address here, address there, number of bytes."""


@dataclass(frozen=True, slots=True)
class SlabbedPool:
    """The shape of a registered pool. Offsets are bytes from its start."""

    shape: PoolShape
    blocks_per_slab: int

    @property
    def num_blocks(self) -> int:
        return self.shape.num_blocks

    @property
    def num_slabs(self) -> int:
        return -(-self.num_blocks // self.blocks_per_slab)

    def regions(self, slab: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of each region of a slab; the last slab may be smaller."""
        first = slab * self.blocks_per_slab
        count = min(self.blocks_per_slab, self.num_blocks - first)
        for index, layer in enumerate(self.shape.layers):
            for plane in range(layer.num_planes):
                yield self.shape.offset(index, plane, first), count * layer.piece_bytes


@dataclass(frozen=True, slots=True)
class RingPart(SlabbedPool):
    """Slots `first` to `first + count - 1` of a ring, as its one slab."""

    first: int
    count: int

    @classmethod
    def of(cls, ring: PoolShape, first: int, count: int) -> RingPart:
        return cls(ring, ring.num_blocks, first, count)

    def regions(self, slab: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of each region; layers of one kind have the same."""
        kinds = {layer: index for index, layer in enumerate(self.shape.layers)}
        for layer, index in kinds.items():
            for plane in range(layer.num_planes):
                yield self.shape.offset(index, plane, self.first), self.count * layer.piece_bytes


@dataclass(frozen=True, slots=True)
class PlacedPool:
    """A pool and the addresses at which its slabs can be written: their starts."""

    pool: SlabbedPool
    starts: tuple[int, ...]
    _starts: npt.NDArray[np.uint64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", np.array(self.starts, np.uint64))

    def addresses(self, layer: int, blocks: Blocks) -> npt.NDArray[np.uint64]:
        """Return the addresses of the blocks' pieces: `[num_blocks, num_planes]`."""
        shape = self.pool.shape
        planes, piece_bytes = shape.plane_offsets(layer), shape.layers[layer].piece_bytes
        starts = self._starts[blocks // self.pool.blocks_per_slab]
        pieces: npt.NDArray[np.uint64] = np.add.outer(
            starts + np.multiply(blocks, piece_bytes, dtype=np.uint64), planes
        )
        return pieces


def slabbed(shape: PoolShape, *, max_slabs: int = MAX_SLABS) -> SlabbedPool:
    """Return a pool in as many slabs as the bounds allow."""
    num_slabs = max(1, min(max_slabs, MAX_REGIONS // shape.num_planes, shape.num_blocks))
    return SlabbedPool(shape, -(-shape.num_blocks // num_slabs))


def ranges_of(
    chunk: LayerChunk, target_blocks: Blocks, source: PlacedPool, target: PlacedPool
) -> Ranges:
    """Return the ranges that write block `i` of the chunk to `target_blocks[i]`.

    Blocks that are adjacent in both pools, and in one slab of each, are one range.
    """
    firsts = _firsts(chunk.source_blocks, target_blocks, source.pool, target.pool)
    counts = np.empty(firsts.size, np.uint64)
    counts[:-1] = firsts[1:] - firsts[:-1]
    counts[-1] = len(chunk) - firsts[-1]
    layer = source.pool.shape.layers[chunk.layer]
    ranges = np.empty((firsts.size, layer.num_planes, 3), np.uint64)
    ranges[:, :, 0] = source.addresses(chunk.layer, chunk.source_blocks[firsts])
    ranges[:, :, 1] = target.addresses(chunk.layer, target_blocks[firsts])
    ranges[:, :, 2] = (counts * np.uint64(layer.piece_bytes))[:, None]
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
