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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.core.chunks import Chunk

MAX_REGIONS = 1024
MAX_SLABS = 16

Range = tuple[int, int, int]
"""(address here, address there, number of bytes)."""


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

    def address(self, layer: int, kind: int, block: int) -> int:
        """Return the address of a block's keys (`kind` 0) or values (1)."""
        start = self.starts[block // self.pool.blocks_per_slab]
        return start + self.pool.offset(layer, kind, block)


def slabbed(
    num_layers: int, num_blocks: int, piece_bytes: int, *, max_slabs: int = MAX_SLABS
) -> SlabbedPool:
    """Return a pool in as many slabs as the bounds allow."""
    num_slabs = max(1, min(max_slabs, MAX_REGIONS // (2 * num_layers), num_blocks))
    return SlabbedPool(num_layers, num_blocks, piece_bytes, -(-num_blocks // num_slabs))


def ranges_of(
    chunk: Chunk, target_blocks: Sequence[int], source: PlacedPool, target: PlacedPool
) -> list[Range]:
    """Return the ranges that write block `i` of the chunk to `target_blocks[i]`.

    Blocks that are adjacent in both pools, and in one slab of each, are one range.
    """
    ranges: list[Range] = []
    for first, count in _runs(chunk.source_blocks, target_blocks, source.pool, target.pool):
        for kind in (0, 1):
            here = source.address(chunk.layer, kind, chunk.source_blocks[first])
            there = target.address(chunk.layer, kind, target_blocks[first])
            ranges.append((here, there, count * source.pool.piece_bytes))
    return ranges


def _runs(
    sources: Sequence[int], targets: Sequence[int], source: SlabbedPool, target: SlabbedPool
) -> list[tuple[int, int]]:
    """Return (first index, count) of each run of blocks that can be written as one range."""
    runs: list[tuple[int, int]] = []
    previous = (-2, -2)
    for index, pair in enumerate(zip(sources, targets, strict=True)):
        is_next = pair == (previous[0] + 1, previous[1] + 1)
        if is_next and pair[0] % source.blocks_per_slab and pair[1] % target.blocks_per_slab:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
        previous = pair
    return runs
