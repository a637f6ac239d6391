"""The pieces of a pool: their checksums, and how they are written without the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kv_transfer.lanes.pool_memory import Bytes, Pool
from kv_transfer.shared.block_arrays import Blocks, runs_of
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


def write(pool: Pool, data: Data, targets: Blocks, source: Parts) -> None:
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
