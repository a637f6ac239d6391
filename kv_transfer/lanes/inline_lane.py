"""The lane of every transport: the bytes follow the header of their DATA frame.

They are message parts that ZMQ sends without copying them. Where sums are wanted the bytes are read
in any case, and copied in the same pass into buffers that are reused. ZMQ's thread then reads from
a cache, which saves a third of its time. Otherwise adjacent blocks are one part, which is the
pool's own memory, and only short ranges are copied together: a part costs about as much as copying
some tens of kilobytes. Copies that were not sent yet are bounded; beyond the bound every range is a
part.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kv_transfer.lanes.lane import Payload
from kv_transfer.lanes.pieces import NO_SUMS, PieceRows, Sums
from kv_transfer.lanes.pool_memory import Bytes, Pool, SourceMemory
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import Blocks, run_lengths
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import Limits
from kv_transfer.transport import Parts


class InlineLane:
    """A `lane.CopyingLane`. `name` is the transport's."""

    def __init__(self, name: str, pool: Pool, limits: Limits) -> None:
        """Make the lane. Raises `ValueError` for a pool that is not in host memory."""
        pool.check_on_host(f"lane {name}")
        self.name = name
        self._rows = PieceRows()
        self._gatherer = Gatherer(self._rows, limits.gathered_bytes)

    def offer(self, peer: Peer) -> bytes | None:
        return b""

    def accept(self, peer: Peer, reply: bytes) -> None:
        pass

    def payload(self, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        pool, placed = memory.place(chunk)
        return self._gatherer.payload(pool, placed, is_summed=is_summed)

    def forget(self, peer: Peer) -> None:
        pass

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        return b""

    def copy(self, write: Write, parts: Parts, pool: Pool) -> Sums:
        return self._rows.copy_parts(write, parts, pool)

    def drop(self, session: bytes) -> None:
        pass

    def close(self) -> None:
        pass


GATHER_BELOW_BYTES = 256 << 10
"""Shorter ranges are copied together, also where no sums are wanted."""
MOST_PART_BYTES = 1 << 20
"""The longest part: with 4 MiB, plain ZMQ used 15 to 25 % more processor time per byte."""


class Gatherer:
    """Makes payloads, with at most `most_bytes` in copies that still exist.

    The window bounds unacknowledged bytes, but not these copies: a copy lives until the transport
    releases it, which may be late in a busy process. Any thread may call `payload`; each may exceed
    the bound by its own copy.
    """

    def __init__(self, rows: PieceRows, most_bytes: int) -> None:
        self._rows = rows
        self._most_bytes = most_bytes
        self._copies: list[weakref.ref[Bytes]] = []
        self._lock = threading.Lock()

    def payload(self, pool: Pool, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        """Return the chunk's bytes: each run, one plane after the other; with sums if asked."""
        layer = pool.shape.layers[chunk.layer]
        lengths = run_lengths(chunk.source_blocks)
        groups = [(len(chunk), False)] if is_summed else _groups(lengths, layer.piece_bytes)
        num_copied = sum(count for count, is_range in groups if not is_range)
        if num_copied and not self._fits(num_copied * layer.num_bytes):
            groups = [(count, True) for count in lengths.tolist()]
        parts: list[memoryview] = []
        part_runs: list[int] = []
        sums: list[Sums] = []
        end = 0
        for count, is_range in groups:
            blocks, ordinals = (
                column[end : end + count] for column in (chunk.source_blocks, chunk.ordinals)
            )
            take = self._range if is_range else self._copy
            planes, sums_of_planes = take(pool, chunk.layer, blocks, ordinals, is_summed)
            for start, stop in _cuts(count, layer.piece_bytes):
                parts += [plane[start:stop].reshape(-1).data for plane in planes]
                part_runs.append(stop - start)
            sums.append(sums_of_planes)
            end += count
        return Payload(
            runs=tuple(part_runs),
            parts=parts,
            sums=_joined(sums, layer.num_planes),
        )

    def _fits(self, num_bytes: int) -> bool:
        with self._lock:
            self._copies = [copy for copy in self._copies if copy() is not None]
            in_use = sum(copy.nbytes for one in self._copies if (copy := one()) is not None)
        return in_use + num_bytes <= self._most_bytes

    def _copy(
        self, pool: Pool, layer: int, blocks: Blocks, ordinals: Blocks, is_summed: bool
    ) -> tuple[Sequence[Bytes], Sums]:
        copy, sums = self._rows.gathered(pool, layer, blocks, ordinals, is_summed=is_summed)
        with self._lock:
            self._copies.append(weakref.ref(copy))
        return list(copy), sums

    def _range(
        self, pool: Pool, layer: int, blocks: Blocks, ordinals: Blocks, is_summed: bool
    ) -> tuple[Sequence[Bytes], Sums]:
        sums = self._rows.sums(pool, layer, blocks, ordinals) if is_summed else NO_SUMS
        first, end = int(blocks[0]), int(blocks[0]) + blocks.size
        return [plane[first:end] for plane in pool.planes(layer)], sums


def _cuts(count: int, piece_bytes: int) -> list[tuple[int, int]]:
    """Return the (first, end) blocks of each part of `count` blocks, about equal in size."""
    most = max(1, MOST_PART_BYTES // piece_bytes)
    if count <= most:
        return [(0, count)]
    num_parts = -(-count // most)
    ends = [count * index // num_parts for index in range(num_parts + 1)]
    return list(pairwise(ends))


def _joined(sums: Sequence[Sums], num_planes: int) -> Sums:
    """Return the sums of several groups of blocks as one."""
    if len(sums) == 1:
        return sums[0]
    by_plane = [np.frombuffer(one, np.uint64).reshape(num_planes, -1) for one in sums]
    return np.concatenate(by_plane, axis=1).tobytes()


def _groups(lengths: npt.NDArray[np.int64], piece_bytes: int) -> list[tuple[int, bool]]:
    """Return (blocks, is one range) of each message part; consecutive short runs are joined."""
    is_short = lengths * piece_bytes < GATHER_BELOW_BYTES
    starts = np.flatnonzero(~(is_short & np.concatenate(([False], is_short[:-1]))))
    sizes = np.add.reduceat(lengths, starts)
    return [(size, size == lengths[at]) for size, at in zip(sizes.tolist(), starts, strict=True)]
