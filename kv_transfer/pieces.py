"""The pool of pieces as a connector sees it: its shape, checksums, and the one write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from common.kv_layout import KVLayout
from kv_transfer.core.chunks import add_to_digest, runs_of
from kv_transfer.core.frames import Data
from kv_transfer.transport import Parts

Pool = npt.NDArray[np.uint8]
"""`[num_layers, 2, num_blocks, piece_bytes]`; 2 is keys, values."""

Sums = tuple[tuple[int, ...], tuple[int, ...]]
"""The piece sum of each block's keys, and of each block's values."""

NO_SUMS: Sums = ((), ())


SCATTER_BELOW_BYTES = 32 << 10
"""Ranges shorter than that, on average, are written by one call of numpy instead of one each."""


def check_pool(pool: Pool, layout: KVLayout) -> None:
    """Raise `ValueError` unless `pool` is the bytes of a cache of this layout."""
    wanted = (layout.num_layers, 2, pool.shape[2] if pool.ndim == 4 else 0, layout.piece_bytes)
    if pool.dtype != np.uint8 or pool.shape != wanted or not pool.flags.c_contiguous:
        raise ValueError(
            f"KV pool is {pool.dtype} {pool.shape}: wanted contiguous uint8 "
            f"[{layout.num_layers}, 2, num_blocks, {layout.piece_bytes}]"
        )


def piece_seed(layer: int, ordinal: int) -> int:
    """A piece's place in the ticket, which its sum is seeded with."""
    return layer << 32 | ordinal


def piece_sum(piece: Any, layer: int, ordinal: int) -> int:
    """XXH3-64 of a block's keys or values, seeded with its place in the ticket."""
    digest: int = xxh3_64_intdigest(piece, piece_seed(layer, ordinal))
    return digest


def pool_sums(pool: Pool, layer: int, blocks: Sequence[int], ordinals: Sequence[int]) -> Sums:
    """The sums of what the pool holds in `blocks`, which are `ordinals` of a ticket."""
    size = pool.shape[3]
    starts = [block * size for block in blocks]
    keys, values = (pool[layer, kind].reshape(-1).data for kind in (0, 1))
    return (
        _sums(keys, starts, size, layer, ordinals),
        _sums(values, starts, size, layer, ordinals),
    )


def _sums(
    part: memoryview, starts: Sequence[int], size: int, layer: int, ordinals: Sequence[int]
) -> tuple[int, ...]:
    pairs = zip(starts, ordinals, strict=True)
    return tuple([piece_sum(part[at : at + size], layer, ordinal) for at, ordinal in pairs])


def block_sums(sums: Sums) -> list[int]:
    """Of each block, its keys' and its values' sum together, for the commit's digest.

    The values' counts three times: a block whose keys and values changed places has another.
    """
    return [add_to_digest(key, 3 * value) for key, value in zip(*sums, strict=True)]


def find_corruption(data: Data, found: Sums) -> str | None:
    """Where `found` differs from the sums that the sender says; None when nowhere."""
    for name, sums, wanted in (
        ("keys", found[0], data.key_sums),
        ("values", found[1], data.value_sums),
    ):
        if sums != wanted:
            at = next(
                i for i, pair in enumerate(zip(sums, wanted, strict=True)) if len({*pair}) > 1
            )
            return (
                f"{name} of layer {data.layer}, block {data.ordinals[at]} of the ticket: "
                f"computed {sums[at]:#x}, the sender says {wanted[at]:#x}"
            )
    return None


def write(pool: Pool, data: Data, targets: Sequence[int], source: Parts) -> None:
    """Copy block `i` of the source to block `targets[i]`: the only writer of a pool.

    `source` holds keys and values of each of `data.runs`, or of each block when there are none.
    """
    done = 0
    for run, count in enumerate(data.runs or (1,) * len(targets)):
        blocks = targets[done : done + count]
        for kind in (0, 1):
            part = np.frombuffer(source[2 * run + kind], np.uint8).reshape(count, pool.shape[3])
            _scatter(pool[data.layer, kind], blocks, part)
        done += count


def _scatter(pieces: Pool, blocks: Sequence[int], part: Pool) -> None:
    runs = runs_of(blocks)
    if len(runs) > 1 and part.nbytes < len(runs) * SCATTER_BELOW_BYTES:
        pieces[list(blocks)] = part
        return
    offset = 0
    for first, length in runs:
        pieces[first : first + length] = part[offset : offset + length]
        offset += length
