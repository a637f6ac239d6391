"""A pool's pieces as rows of bytes at addresses, summed and copied in one pass by a kernel.

Otherwise numpy and xxhash do the same, more slowly: for pieces that are too short for the kernel,
and where the processor or the installation does not support it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer import pieces
from kv_transfer.core.block_arrays import Blocks, as_blocks
from kv_transfer.core.effects import Write
from kv_transfer.pieces import NO_SUMS, Pool, Sums
from kv_transfer.transport import Parts

Addresses = npt.NDArray[np.uint64]
"""Addresses of rows: the keys of some blocks, then their values. Seeds are in the same order."""


class PieceRows:
    """Sums and copies pieces. Making one loads the kernel: a second, and more the first time."""

    def __init__(self) -> None:
        try:
            from kv_transfer import fused_copy
        except ModuleNotFoundError:  # Nodes have numba; a small test machine may not.
            self._kernel = None
        else:
            self._kernel = fused_copy

    def sums(self, pool: Pool, layer: int, blocks: Blocks, ordinals: Blocks) -> Sums:
        """Return the sums of blocks of a pool, like `pieces.pool_sums`."""
        piece_bytes = pool.shape[3]
        if self._kernel is None or not self._kernel.can_sum(piece_bytes):
            return pieces.pool_sums(pool, layer, blocks, ordinals)
        rows, seeds = _rows(pool, layer, blocks), _seeds(layer, ordinals)
        return _as_sums(self._kernel.sum_rows(rows, piece_bytes, seeds))

    def gathered(
        self,
        pool: Pool,
        layer: int,
        blocks: Blocks,
        ordinals: Blocks,
        *,
        is_summed: bool,
    ) -> tuple[Pool, Sums]:
        """Copy some blocks of a layer to a pool of one layer; with their sums if asked."""
        piece_bytes = pool.shape[3]
        copy = np.empty((1, 2, len(blocks), piece_bytes), np.uint8)
        targets = _rows(copy, 0, np.arange(len(blocks), dtype=np.uint32))
        if self._can_copy(piece_bytes, targets):
            sources = _rows(pool, layer, blocks)
            return copy, self._copy(targets, sources, piece_bytes, _seeds(layer, ordinals))
        for kind in (0, 1):
            # `clip` only saves numpy a buffer: the blocks are inside the pool.
            np.take(pool[layer, kind], blocks, axis=0, out=copy[0, kind], mode="clip")
        return copy, self.sums(pool, layer, blocks, ordinals) if is_summed else NO_SUMS

    def copy_parts(self, write: Write, parts: Parts, pool: Pool) -> Sums:
        """Copy a frame's payload into the pool; return its sums unless `write.verify` is off."""
        piece_bytes, targets = pool.shape[3], _target_rows(write, pool)
        if not self._can_copy(piece_bytes, targets):
            return _write_parts(write, parts, pool)
        sources = _part_rows(write.data.runs, parts, piece_bytes)
        return self._copy(targets, sources, piece_bytes, _write_seeds(write))

    def copy_blocks(self, write: Write, source: Pool, pool: Pool) -> Sums:
        """Copy the blocks that a frame names out of another pool; return sums like `copy_parts`."""
        layer, blocks = write.data.layer, as_blocks(write.data.source_blocks)
        piece_bytes, targets = pool.shape[3], _target_rows(write, pool)
        if not self._can_copy(piece_bytes, targets):
            return _write_parts(write, [kind[blocks].data for kind in source[layer]], pool)
        sources = _rows(source, layer, blocks)
        return self._copy(targets, sources, piece_bytes, _write_seeds(write))

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


def _rows(pool: Pool, layer: int, blocks: Blocks) -> Addresses:
    piece_bytes = np.uint64(pool.strides[2])
    keys = np.uint64(pool[layer, 0].ctypes.data) + piece_bytes * blocks.astype(np.uint64)
    return np.concatenate((keys, keys + np.uint64(pool.strides[1])))


def _target_rows(write: Write, pool: Pool) -> Addresses:
    return _rows(pool, write.data.layer, write.target_blocks)


def _part_rows(runs: Sequence[int], parts: Parts, piece_bytes: int) -> Addresses:
    """Return the rows of message parts: of each run its keys, then its values."""
    starts = np.array([np.frombuffer(part, np.uint8).ctypes.data for part in parts], np.uint64)
    steps = np.arange(max(runs), dtype=np.uint64) * np.uint64(piece_bytes)
    offsets = np.concatenate([steps[:count] for count in runs])
    keys, values = (np.repeat(starts[kind::2], runs) + offsets for kind in (0, 1))
    return np.concatenate((keys, values))


def _seeds(layer: int, ordinals: Blocks) -> Addresses:
    """Return `pieces.piece_seed` of each block, for its keys and again for its values."""
    seeds = ordinals.astype(np.uint64) | np.uint64(pieces.piece_seed(layer, 0))
    return np.concatenate((seeds, seeds))


def _write_seeds(write: Write) -> Addresses:
    return _seeds(write.data.layer, as_blocks(write.data.ordinals))


def _as_sums(sums: npt.NDArray[np.uint64]) -> Sums:
    return sums.astype("<u8", copy=False).tobytes()
