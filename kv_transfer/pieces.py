"""The pool of pieces as a connector sees it: its shape, checksums, and the one write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from common.kv_layout import KVLayout
from kv_transfer.core.block_arrays import Blocks, runs_of
from kv_transfer.core.chunks import BlockSums
from kv_transfer.core.frames import Data
from kv_transfer.transport import Parts

Pool = npt.NDArray[np.uint8]
"""`[num_layers, 2, num_blocks, piece_bytes]`; 2 is keys, values."""

Sums = bytes
"""The piece sum of each block's keys, then of each block's values: 8 bytes each, little-endian.

They stay in wire format: hundreds of Python integers per frame would be slower.
"""

NO_SUMS: Sums = b""
_SUM = np.dtype("<u8")


SCATTER_BELOW_BYTES = 32 << 10
"""Ranges shorter than this on average are written by one numpy call instead of one each."""


def check_pool(pool: Pool, layout: KVLayout) -> None:
    """Raise `ValueError` unless `pool` is the bytes of a cache of this layout."""
    wanted = layout.pool_shape(pool.shape[2] if pool.ndim == 4 else 0)
    if pool.dtype != np.uint8 or pool.shape != wanted or not pool.flags.c_contiguous:
        raise ValueError(
            f"KV pool is {pool.dtype} {pool.shape}: wanted contiguous uint8 "
            f"[{layout.num_layers}, 2, num_blocks, {layout.piece_bytes}]"
        )


def piece_seed(layer: int, ordinal: int) -> int:
    """Return a piece's position in the ticket, which seeds its sum."""
    return layer << 32 | ordinal


def piece_sum(piece: Any, layer: int, ordinal: int) -> int:
    """Return XXH3-64 of a block's keys or values, seeded with its position in the ticket."""
    digest: int = xxh3_64_intdigest(piece, piece_seed(layer, ordinal))
    return digest


def pool_sums(pool: Pool, layer: int, blocks: Blocks, ordinals: Blocks) -> Sums:
    """Return the sums of the pool's `blocks`, which are `ordinals` of a ticket."""
    size = pool.shape[3]
    starts, places = [block * size for block in blocks.tolist()], ordinals.tolist()
    return packed_sums(
        piece_sum(part[at : at + size], layer, ordinal)
        for part in (pool[layer, kind].reshape(-1).data for kind in (0, 1))
        for at, ordinal in zip(starts, places, strict=True)
    )


def packed_sums(sums: Iterable[int]) -> Sums:
    return np.fromiter(sums, _SUM).tobytes()


def unpacked_sums(sums: Sums) -> npt.NDArray[np.uint64]:
    """Return the sums as numbers `[2, num_blocks]`: of keys, of values."""
    return np.frombuffer(sums, _SUM).reshape(2, -1)


def block_sums(sums: Sums) -> BlockSums:
    """Return one number per block from its keys' and values' sums, for the commit's digest.

    The values' sum counts three times, so swapping keys and values changes the result.
    """
    keys, values = unpacked_sums(sums)
    both: BlockSums = keys + np.uint64(3) * values
    return both


def damaged_ordinals(data: Data, found: Sums) -> frozenset[int]:
    """Return the ordinals of the blocks whose sums in `found` differ from the sender's."""
    if found == data.sums:
        return frozenset()
    is_damaged = (unpacked_sums(found) != unpacked_sums(data.sums)).any(axis=0)
    return frozenset(data.ordinals[index] for index in np.flatnonzero(is_damaged))


def describe_damage(data: Data, found: Sums) -> str:
    """Return in words where `found` first differs from the sender's sums."""
    computed, said = unpacked_sums(found), unpacked_sums(data.sums)
    kind, at = np.argwhere(computed != said)[0]
    return (
        f"{('keys', 'values')[kind]} of layer {data.layer}, "
        f"block {data.ordinals[at]} of the ticket: "
        f"computed {computed[kind, at]:#x}, the sender sent {said[kind, at]:#x}"
    )


def write(pool: Pool, data: Data, targets: Blocks, source: Parts) -> None:
    """Copy block `i` of the source to block `targets[i]`, without the kernel.

    `source` holds keys and values of each of `data.runs`, or of all blocks when there are no runs.
    """
    done = 0
    for run, count in enumerate(data.runs or (targets.size,)):
        blocks = targets[done : done + count]
        for kind in (0, 1):
            part = np.frombuffer(source[2 * run + kind], np.uint8).reshape(count, pool.shape[3])
            _scatter(pool[data.layer, kind], blocks, part)
        done += count


def _scatter(pieces: Pool, blocks: Blocks, part: Pool) -> None:
    runs = runs_of(blocks)
    if len(runs) > 1 and part.nbytes < len(runs) * SCATTER_BELOW_BYTES:
        pieces[blocks] = part
        return
    offset = 0
    for first, length in runs:
        pieces[first : first + length] = part[offset : offset + length]
        offset += length
