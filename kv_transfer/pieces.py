"""The pool of pieces as a connector sees it: checksums, views to send, and the one write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from common.kv_layout import KVLayout
from kv_transfer.core.chunks import Chunk, runs_of
from kv_transfer.core.frames import Data

Pool = npt.NDArray[np.uint8]
"""`[num_layers, 2, num_blocks, piece_bytes]`; 2 is keys, values."""


def check_pool(pool: Pool, layout: KVLayout) -> None:
    """Raise `ValueError` unless `pool` is the bytes of a cache of this layout."""
    wanted = (layout.num_layers, 2, pool.shape[2] if pool.ndim == 4 else 0, layout.piece_bytes)
    if pool.dtype != np.uint8 or pool.shape != wanted or not pool.flags.c_contiguous:
        raise ValueError(
            f"KV pool is {pool.dtype} {pool.shape}: wanted contiguous uint8 "
            f"[{layout.num_layers}, 2, num_blocks, {layout.piece_bytes}]"
        )


def checksums(pool: Pool, chunk: Chunk) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """XXH3-64 of each block's keys, and of each block's values."""
    keys, values = pool[chunk.layer]
    return (
        tuple(xxh3_64_intdigest(keys[block]) for block in chunk.source_blocks),
        tuple(xxh3_64_intdigest(values[block]) for block in chunk.source_blocks),
    )


def views(pool: Pool, chunk: Chunk) -> list[memoryview]:
    """The chunk's payload without copying: for each run its keys, then its values."""
    return [
        pool[chunk.layer, kind, first : first + count].reshape(-1).data
        for first, count in chunk.runs
        for kind in (0, 1)
    ]


def find_corruption(data: Data, payload: Sequence[memoryview], piece_bytes: int) -> str | None:
    """What is wrong with the payload's checksums; None when all are right.

    The payload's sizes were checked before.
    """
    index = 0
    for run, count in enumerate(data.runs):
        keys, values = payload[2 * run], payload[2 * run + 1]
        for start in range(0, count * piece_bytes, piece_bytes):
            end = start + piece_bytes
            for name, part, wanted in (
                ("keys", keys, data.key_sums[index]),
                ("values", values, data.value_sums[index]),
            ):
                found = xxh3_64_intdigest(part[start:end])
                if found != wanted:
                    return (
                        f"{name} of layer {data.layer}, block {data.ordinals[index]} of the "
                        f"ticket: computed {found:#x}, the sender says {wanted:#x}"
                    )
            index += 1
    return None


def write(pool: Pool, data: Data, targets: Sequence[int], payload: Sequence[memoryview]) -> None:
    """Copy block `i` of the payload to block `targets[i]`: the only writer of a pool."""
    piece_bytes = pool.shape[3]
    done = 0
    for run, count in enumerate(data.runs):
        blocks = targets[done : done + count]
        for kind in (0, 1):
            source = np.frombuffer(payload[2 * run + kind], np.uint8).reshape(count, piece_bytes)
            offset = 0
            for first, length in runs_of(blocks):
                pool[data.layer, kind, first : first + length] = source[offset : offset + length]
                offset += length
        done += count
