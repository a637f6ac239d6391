"""A pool's pieces as rows of bytes at addresses, summed and copied in one pass by a kernel.

Otherwise numpy and xxhash do the same, more slowly: for pieces that are too short for the kernel,
and where the processor or the installation does not support it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.lanes import pieces
from kv_transfer.lanes.pieces import NO_SUMS, Sums
from kv_transfer.lanes.pool_memory import Addresses, Bytes, Pool
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import Blocks, as_blocks
from kv_transfer.transport import Parts


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
        """Return the sums of blocks of a pool, like `pieces.pool_sums`."""
        pool.check_on_host("the sum of a block")
        piece_bytes = pool.piece_bytes(layer)
        if self._kernel is None or not self._kernel.can_sum(piece_bytes):
            return pieces.pool_sums(pool, layer, blocks, ordinals)
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
            return copy, self._copy(targets, sources, piece_bytes, _seeds(pool, layer, ordinals))
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
    pieces.write(pool, write.data, write.target_blocks, parts)
    if write.verify == "off":
        return NO_SUMS
    ordinals = as_blocks(write.data.ordinals)
    return pieces.pool_sums(pool, write.data.layer, write.target_blocks, ordinals)


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
    """Return `pieces.piece_seed` of each block, for one plane after the other."""
    seeds = ordinals.astype(np.uint64) | np.uint64(pieces.piece_seed(layer, 0))
    return np.concatenate((seeds,) * pool.num_planes(layer))  # `np.tile` takes ten times as long.


def _write_seeds(write: Write, pool: Pool) -> Addresses:
    return _seeds(pool, write.data.layer, as_blocks(write.data.ordinals))


def _as_sums(sums: npt.NDArray[np.uint64]) -> Sums:
    return sums.astype("<u8", copy=False).tobytes()
