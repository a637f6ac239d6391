"""The pieces of a pool: their checksums, and how they are copied.

A kernel sums and copies in one pass, over rows of bytes at addresses. Otherwise numpy and xxhash do
the same, more slowly: for pieces that are too short for the kernel, and where the processor or the
installation does not support it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kv_transfer.lanes.pool_memory import Addresses, Bytes, Pool
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import Blocks, as_blocks, runs_of
from kv_transfer.shared.chunks import BlockSums
from kv_transfer.transport import Parts
from kv_transfer.wire.frames import Data

Sums = bytes
"""The piece sum of each block in one plane after the other: 8 bytes each, little-endian.

They stay in wire format: hundreds of Python integers per frame would be slower.
"""

NO_SUMS: Sums = b""
_SUM = np.dtype("<u8")


SCATTER_BELOW_BYTES = 32 << 10
"""Ranges shorter than this on average are written by one numpy call instead of one each."""


def piece_seed(layer: int, ordinal: int) -> int:
    """Return a piece's position in the ticket, which seeds its sum."""
    return layer << 32 | ordinal


def piece_sum(piece: Any, layer: int, ordinal: int) -> int:
    """Return XXH3-64 of a piece, seeded with its block's position in the ticket."""
    digest: int = xxh3_64_intdigest(piece, piece_seed(layer, ordinal))
    return digest


def pool_sums(pool: Pool, layer: int, blocks: Blocks, ordinals: Blocks) -> Sums:
    """Return the sums of the pool's `blocks`, which are `ordinals` of a ticket."""
    size = pool.piece_bytes(layer)
    starts, places = [block * size for block in blocks.tolist()], ordinals.tolist()
    return packed_sums(
        piece_sum(part[at : at + size], layer, ordinal)
        for part in (plane.reshape(-1).data for plane in pool.planes(layer))
        for at, ordinal in zip(starts, places, strict=True)
    )


def packed_sums(sums: Iterable[int]) -> Sums:
    return np.fromiter(sums, _SUM).tobytes()


def unpacked_sums(sums: Sums, num_blocks: int) -> npt.NDArray[np.uint64]:
    """Return the sums of so many blocks as numbers `[num_planes, num_blocks]`."""
    return np.frombuffer(sums, _SUM).reshape(-1, num_blocks)


def block_sums(sums: Sums, num_blocks: int) -> BlockSums:
    """Return one number per block from the sums of its pieces, for the commit's digest.

    The sum of the next plane counts three times as much, so swapping planes changes the result.
    """
    first, *others = unpacked_sums(sums, num_blocks)
    total: BlockSums = first.copy()
    for plane, of_plane in enumerate(others, 1):
        total += np.uint64(3**plane) * of_plane
    return total


def damaged_ordinals(data: Data, found: Sums) -> frozenset[int]:
    """Return the ordinals of the blocks whose sums in `found` differ from the sender's."""
    if found == data.sums:
        return frozenset()
    computed, said = _both(data, found)
    is_damaged = (computed != said).any(axis=0)
    return frozenset(data.ordinals[index] for index in np.flatnonzero(is_damaged))


def describe_damage(data: Data, found: Sums) -> str:
    """Return in words where `found` first differs from the sender's sums."""
    computed, said = _both(data, found)
    plane, at = np.argwhere(computed != said)[0]
    what = ("keys", "values")[plane] if len(said) == 2 else f"plane {plane}"
    return (
        f"{what} of layer {data.layer}, "
        f"block {data.ordinals[at]} of the ticket: "
        f"computed {computed[plane, at]:#x}, the sender sent {said[plane, at]:#x}"
    )


def _both(data: Data, found: Sums) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    num_blocks = len(data.ordinals)
    return unpacked_sums(found, num_blocks), unpacked_sums(data.sums, num_blocks)


def write_blocks(pool: Pool, data: Data, targets: Blocks, source: Parts) -> None:
    """Copy block `i` of the source to block `targets[i]`, without the kernel.

    `source` holds all planes of each of `data.runs`, or of all blocks when there are no runs.
    """
    planes = pool.planes(data.layer)
    done = 0
    for run, count in enumerate(data.runs or (targets.size,)):
        blocks = targets[done : done + count]
        for index, plane in enumerate(planes):
            part = np.frombuffer(source[len(planes) * run + index], np.uint8)
            _scatter(plane, blocks, part.reshape(count, -1))
        done += count


def _scatter(plane: Bytes, blocks: Blocks, part: Bytes) -> None:
    runs = runs_of(blocks)
    if len(runs) > 1 and part.nbytes < len(runs) * SCATTER_BELOW_BYTES:
        plane[blocks] = part
        return
    offset = 0
    for first, length in runs:
        plane[first : first + length] = part[offset : offset + length]
        offset += length


class PieceRows:
    """Sums and copies pieces in host memory. Rows are the blocks in one plane after the other.

    Making one loads the kernel: a second, and more the first time.
    """

    def __init__(self) -> None:
        try:
            from kv_transfer.lanes import fused_copy
        except ModuleNotFoundError:  # Nodes have numba; a small test machine may not.
            self._kernel = None
        else:
            self._kernel = fused_copy

    def sums(self, pool: Pool, layer: int, blocks: Blocks, ordinals: Blocks) -> Sums:
        """Return the sums of blocks of a pool, like `pool_sums`."""
        pool.check_on_host("the sum of a block")
        piece_bytes = pool.piece_bytes(layer)
        if self._kernel is None or not self._kernel.can_sum(piece_bytes):
            return pool_sums(pool, layer, blocks, ordinals)
        seeds = _seeds(pool, layer, ordinals)
        rows = _rows(pool.addresses(layer), blocks, piece_bytes)
        return _as_sums(self._kernel.sum_rows(rows, piece_bytes, seeds))

    def gathered(
        self,
        pool: Pool,
        layer: int,
        blocks: Blocks,
        ordinals: Blocks,
        *,
        is_summed: bool,
    ) -> tuple[Bytes, Sums]:
        """Copy some blocks of a layer, with their sums if asked.

        Returns the copy `[num_planes, len(blocks), piece_bytes]`.
        """
        piece_bytes, num_planes = pool.piece_bytes(layer), pool.num_planes(layer)
        copy = np.empty((num_planes, len(blocks), piece_bytes), np.uint8)
        steps = np.arange(copy.size // piece_bytes, dtype=np.uint64) * np.uint64(piece_bytes)
        targets = np.uint64(copy.ctypes.data) + steps
        if self._can_copy(piece_bytes, targets):
            sources = _rows(pool.addresses(layer), blocks, piece_bytes)
            # The kernel sums what it copies in any case.
            sums = self._copy(targets, sources, piece_bytes, _seeds(pool, layer, ordinals))
            return copy, sums if is_summed else NO_SUMS
        for plane, gathered in zip(pool.planes(layer), copy, strict=True):
            # `clip` only saves numpy a buffer: the blocks are inside the pool.
            np.take(plane, blocks, axis=0, out=gathered, mode="clip")
        return copy, self.sums(pool, layer, blocks, ordinals) if is_summed else NO_SUMS

    def copy_parts(self, write: Write, parts: Parts, pool: Pool) -> Sums:
        """Copy a frame's payload into the pool; return its sums unless `write.verify` is off."""
        piece_bytes, targets = pool.piece_bytes(write.data.layer), _target_rows(write, pool)
        if not self._can_copy(piece_bytes, targets):
            return _write_parts(write, parts, pool)
        num_planes = pool.num_planes(write.data.layer)
        sources = _part_rows(write.data.runs, parts, piece_bytes, num_planes)
        return self._copy(targets, sources, piece_bytes, _write_seeds(write, pool))

    def copy_blocks(self, write: Write, source: Pool, blocks: Blocks, pool: Pool) -> Sums:
        """Copy the blocks of a frame, `blocks` of `source`; return sums like `copy_parts`."""
        layer = write.data.layer
        piece_bytes, targets = pool.piece_bytes(layer), _target_rows(write, pool)
        if not self._can_copy(piece_bytes, targets):
            return _write_parts(write, [plane[blocks].data for plane in source.planes(layer)], pool)
        sources = _rows(source.addresses(layer), blocks, piece_bytes)
        return self._copy(targets, sources, piece_bytes, _write_seeds(write, pool))

    def _can_copy(self, piece_bytes: int, targets: Addresses) -> bool:
        return self._kernel is not None and self._kernel.can_copy(piece_bytes, targets)

    def _copy(
        self, targets: Addresses, sources: Addresses, piece_bytes: int, seeds: Addresses
    ) -> Sums:
        assert self._kernel is not None
        return _as_sums(self._kernel.copy_rows(targets, sources, piece_bytes, seeds))


def _write_parts(write: Write, parts: Parts, pool: Pool) -> Sums:
    write_blocks(pool, write.data, write.target_blocks, parts)
    if write.verify == "off":
        return NO_SUMS
    ordinals = as_blocks(write.data.ordinals)
    return pool_sums(pool, write.data.layer, write.target_blocks, ordinals)


def _rows(planes: Addresses, blocks: Blocks, piece_bytes: int) -> Addresses:
    """Return the addresses of the blocks' pieces in planes that begin at these addresses."""
    offsets = np.uint64(piece_bytes) * blocks.astype(np.uint64)
    return (planes[:, None] + offsets).reshape(-1)


def _target_rows(write: Write, pool: Pool) -> Addresses:
    layer = write.data.layer
    return _rows(pool.addresses(layer), write.target_blocks, pool.piece_bytes(layer))


def _part_rows(runs: Sequence[int], parts: Parts, piece_bytes: int, num_planes: int) -> Addresses:
    """Return the rows of message parts: of each run one plane after the other."""
    starts = np.array([np.frombuffer(part, np.uint8).ctypes.data for part in parts], np.uint64)
    steps = np.arange(max(runs), dtype=np.uint64) * np.uint64(piece_bytes)
    offsets = np.concatenate([steps[:count] for count in runs])
    of_runs = np.repeat(starts.reshape(-1, num_planes).T, runs, axis=1)
    rows: Addresses = (of_runs + offsets).reshape(-1)
    return rows


def _seeds(pool: Pool, layer: int, ordinals: Blocks) -> Addresses:
    """Return `piece_seed` of each block, for one plane after the other."""
    seeds = ordinals.astype(np.uint64) | np.uint64(piece_seed(layer, 0))
    return np.concatenate((seeds,) * pool.num_planes(layer))  # `np.tile` takes ten times as long.


def _write_seeds(write: Write, pool: Pool) -> Addresses:
    return _seeds(pool, write.data.layer, as_blocks(write.data.ordinals))


def _as_sums(sums: npt.NDArray[np.uint64]) -> Sums:
    return sums.astype("<u8", copy=False).tobytes()
