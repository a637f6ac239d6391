"""The payload of a DATA frame out of a pool: message parts that ZMQ sends without copying them.

Blocks that lie side by side are one part, which is the pool's own memory. A part costs about as
much as copying some tens of kilobytes, so that short ranges are copied together into one: but only
while what was copied before and has not been sent yet stays within bounds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kv_transfer.core.chunks import Chunk
from kv_transfer.core.limits import DEFAULT_WINDOW_BYTES
from kv_transfer.lane import Payload
from kv_transfer.pieces import Pool

GATHER_BELOW_BYTES = 256 << 10
"""Ranges shorter than that are copied together."""


class Gatherer:
    """Makes payloads out of one pool, with at most `most_bytes` in copies that still exist.

    A window bounds what is not acknowledged, but not these: a copy lives until the transport lets
    go of it, which a busy process may do late.
    """

    def __init__(self, pool: Pool, most_bytes: int = DEFAULT_WINDOW_BYTES) -> None:
        self._pool = pool
        self._most_bytes = most_bytes
        self._copies: list[weakref.ref[Pool]] = []

    def payload(self, chunk: Chunk) -> Payload:
        """The chunk's bytes: for each run its keys, then its values."""
        runs = chunk.runs
        groups = _groups(runs, self._pool.shape[3])
        num_copied = sum(count for count, is_range in groups if not is_range)
        if num_copied and not self._has_room(2 * num_copied * self._pool.shape[3]):
            groups = [(count, True) for _, count in runs]
        parts: list[memoryview] = []
        ends = accumulate(count for count, _ in groups)
        for (count, is_range), end in zip(groups, ends, strict=True):
            blocks = chunk.source_blocks[end - count : end]
            for pieces in self._pool[chunk.layer]:
                parts.append(_range(pieces, blocks) if is_range else self._copy(pieces, blocks))
        return Payload(runs=tuple(count for count, _ in groups), parts=parts)

    def _has_room(self, num_bytes: int) -> bool:
        self._copies = [copy for copy in self._copies if copy() is not None]
        in_use = sum(copy.nbytes for one in self._copies if (copy := one()) is not None)
        return in_use + num_bytes <= self._most_bytes

    def _copy(self, pieces: Pool, blocks: Sequence[int]) -> memoryview:
        # `clip` only spares numpy a buffer of its own: the blocks are inside the pool.
        copy = np.take(pieces, blocks, axis=0, mode="clip")
        self._copies.append(weakref.ref(copy))
        return copy.reshape(-1).data


def _range(pieces: Pool, blocks: Sequence[int]) -> memoryview:
    return pieces[blocks[0] : blocks[0] + len(blocks)].reshape(-1).data


def _groups(runs: Sequence[tuple[int, int]], piece_bytes: int) -> list[tuple[int, bool]]:
    """(blocks, whether they are one range) of each message part; short runs in a row are joined."""
    groups: list[tuple[int, bool]] = []
    is_open = False
    for _, count in runs:
        is_short = count * piece_bytes < GATHER_BELOW_BYTES
        if is_short and is_open:
            groups[-1] = (groups[-1][0] + count, False)
        else:
            groups.append((count, True))
        is_open = is_short
    return groups
