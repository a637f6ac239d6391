"""A card's pool played by host memory that other processes open by its descriptor.

Work is done on a thread that the test controls (`Copier`), in order, and so later than it is begun.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from common.errors import HandoffFailed
from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.card_pool import CardSums, OpenedPool
from kv_transfer.lanes.pool_memory import Bytes, Pool, host_pool, ring_pool
from kv_transfer.shared.block_arrays import Blocks
from tests.support.kv.fake_late_lane import Copier

WAIT_S = 20.0
_INDEX = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class _Queued:
    def __init__(self, future: Future[CardSums | None]) -> None:
        self._future = future

    def wait(self) -> CardSums | None:
        return self._future.result(WAIT_S)


class FakeOpened:
    """A mapping of another pool."""

    def __init__(self, pool: Pool, mapped: mmap.mmap) -> None:
        self.pool, self._mapped = pool, mapped
        self.is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class FakeCard:
    """A `card_pool.CardPool`. `content` is what the card holds, for the test alone."""

    _numbers = itertools.count()

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout, self.num_blocks, self.copier = layout, num_blocks, Copier()
        used = num_blocks * layout.block_bytes
        self.shared_bytes = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
        self._descriptor = os.memfd_create(f"fake-card-{next(self._numbers)}")
        os.ftruncate(self._descriptor, self.shared_bytes)
        mapped = mmap.mmap(self._descriptor, self.shared_bytes)
        self.content: Bytes = np.frombuffer(mapped, np.uint8)[:used]
        self._pool = host_pool(self.content, layout)
        self.ring: Pool | None = None
        self.opened: list[FakeOpened] = []
        self.fails: HandoffFailed | None = None
        self.num_behind_steps = 0

    def close(self) -> None:
        """Do as a process that ends: who has the memory open keeps it."""
        os.close(self._descriptor)
        self.copier.close()

    def export(self) -> int:
        if self.fails is not None:
            raise self.fails
        return os.dup(self._descriptor)

    def open(self, descriptor: int, num_bytes: int, num_blocks: int) -> OpenedPool:
        if self.fails is not None:
            raise self.fails
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                raise HandoffFailed("the memory is shorter")
            mapped = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise HandoffFailed(f"this is no card memory: {error}") from None
        content = np.frombuffer(mapped, np.uint8)[: num_blocks * self.layout.block_bytes]
        self.opened.append(FakeOpened(host_pool(content, self.layout), mapped))
        return self.opened[-1]

    def begin_sums(self, layer: int, blocks: Blocks) -> _Queued:
        return self._begin(lambda: _sums(self._pool, layer, blocks))

    def begin_copy(
        self,
        source: OpenedPool,
        layer: int,
        source_blocks: Blocks,
        blocks: Blocks,
        *,
        queue: int,
        is_behind_steps: bool,
        is_summed: bool,
    ) -> _Queued:
        assert isinstance(source, FakeOpened)
        self.num_behind_steps += is_behind_steps

        def copy() -> CardSums | None:
            assert not source.is_closed
            for target, origin in zip(
                self._pool.planes(layer), source.pool.planes(layer), strict=True
            ):
                target[blocks] = origin[source_blocks]
            return _sums(self._pool, layer, blocks) if is_summed else None

        return self._begin(copy)

    def use_ring(self, memory: Bytes) -> None:
        assert self.ring is None
        self.ring = ring_pool(memory, self.layout)

    def begin_out(self, layer: int, blocks: Blocks, slots: Blocks) -> _Queued:
        assert self.ring is not None
        pools = self._pool, self.ring
        return self._begin(lambda: _copy_between(*pools, layer, blocks, slots))

    def begin_in(self, layer: int, slots: Blocks, blocks: Blocks) -> _Queued:
        assert self.ring is not None
        pools = self.ring, self._pool
        return self._begin(lambda: _copy_between(*pools, layer, slots, blocks))

    def _begin(self, work: Callable[[], CardSums | None]) -> _Queued:
        if self.fails is not None:
            raise self.fails
        future: Future[CardSums | None] = Future()

        def run() -> None:
            if self.copier.fails_next:
                self.copier.fails_next = False
                future.set_exception(HandoffFailed("the card failed"))
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.copier.begin(run)
        return _Queued(future)


def _copy_between(source: Pool, target: Pool, layer: int, blocks: Blocks, to: Blocks) -> None:
    for origin, plane in zip(source.planes(layer), target.planes(layer), strict=True):
        plane[to] = origin[blocks]


def _sums(pool: Pool, layer: int, blocks: Blocks) -> CardSums:
    return np.array(
        [[bytes_sum(plane[block]) for block in blocks] for plane in pool.planes(layer)], np.uint64
    )


def bytes_sum(content: np.ndarray) -> int:
    """Return the sum that a card makes of some bytes (`kernels/gathering.py`)."""
    padded = np.zeros(-(-content.size // 8) * 8, np.uint8)
    padded[: content.size] = content
    words = padded.view("<u8")
    mixed = words + _INDEX * np.arange(1, words.size + 1, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))
