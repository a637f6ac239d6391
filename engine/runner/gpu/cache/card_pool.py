"""A cache on a card as a connector's pool: a `kv_transfer.lanes.card_pool.CardPool`.

Work is queued on streams of its own, beside the steps and with priority over them, and waited for
on threads of the connector. Sums are written to pinned memory: each program of the kernel writes
its part, and the waiting thread adds the parts up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import HandoffFailed
from engine.runner.cache.device_copies import IsComplete
from engine.runner.gpu.cache.copies import CardSide, copy_specs
from engine.runner.gpu.cache.layer_ends import LayerEnds
from engine.runner.gpu.cache.pinned import PinnedBuffer, PinnedBuffers
from engine.runner.gpu.cuda_driver import Device, Event, GpuError, Memory
from engine.runner.gpu.kernels.gathering import copy_and_sum
from engine.runner.gpu.launcher import BindableKernel, KernelSpec
from engine.runner.gpu.launches import KVPool
from engine.runner.gpu.shareable import ShareableMemory, open_shareable

_logger = logging.getLogger("pdserve.engine")

_TYPES = {
    "source": "*i64", "source_ids": "*i32", "target": "*i64", "target_ids": "*i32", "sums": "*i64",
    "num_source_blocks": "i32", "num_blocks": "i32",
}  # fmt: skip
_PART_WORDS = 2048
"""Words of a block that one program moves: 16 KiB."""
_WORD_BYTES = 8
_ALIGNMENT = 256
_LOOK_S = 0.0001
"""Seconds between two looks for the end of work; the driver's blocking wait wakes later."""


@dataclass(frozen=True, slots=True)
class OpenedCache:
    """Another process's cache. `wait_for_copies` waits for the queued copies out of it."""

    device: Device
    memory: Memory
    num_blocks: int
    wait_for_copies: Callable[[], None]

    def close(self) -> None:
        self.device.use()
        self.wait_for_copies()
        self.memory.close()


class _Moved:
    """Blocks that a kernel moves or sums. `sums` int64 `[2, blocks, parts]` in `buffer`."""

    def __init__(
        self, device: Device, done: Event, buffers: PinnedBuffers, buffer: PinnedBuffer,
        sums: np.ndarray | None,
    ) -> None:  # fmt: skip
        self._device, self._done = device, done
        self._buffers, self._taken, self._sums = buffers, buffer, sums

    def wait(self) -> np.ndarray | None:
        with _failing():
            self._device.use()
            while not self._done.is_reached():
                time.sleep(_LOOK_S)
            self._done.close()
        found = None
        if self._sums is not None:
            found = self._sums.view(np.uint64).sum(axis=2, dtype=np.uint64)
        self._buffers.give_back(self._taken)
        return found


class _ThroughRing:
    """Blocks on their way between the card and the ring."""

    def __init__(self, is_complete: IsComplete, finish: Callable[[], None]) -> None:
        self._is_complete, self._finish = is_complete, finish

    def wait(self) -> None:
        with _failing():
            while not self._is_complete():
                time.sleep(_LOOK_S)
            self._finish()


class GpuCardPool:
    """The pool of one cache, which may have moved: `pool` and `memory` say where it is.

    A layer's blocks are read after the step that wrote them: see `layer_ends`.
    """

    def __init__(
        self,
        device: Device,
        make_kernel: Callable[[KernelSpec], BindableKernel],
        pool: Callable[[], KVPool],
        memory: Callable[[], Memory],
        compute_stream: int,
        buffers: PinnedBuffers,
        layer_ends: LayerEnds,
    ) -> None:
        self._device, self._make_kernel, self._compute = device, make_kernel, compute_stream
        self._pool, self._memory = pool, memory
        self._ring: np.ndarray | None = None
        self._pinned_ring: Memory | None = None
        # A stream each: copies into the cache wait for steps, for which copies out must not wait.
        self._out, self._in = (
            CardSide(device, make_kernel, pool, compute_stream, buffers, lambda: self._pinned_ring)
            for _ in range(2)
        )
        self._layer_ends, self._buffers = layer_ends, buffers
        self._sum_stream = device.stream(is_urgent=True)
        self._copy_streams: dict[int, int] = {}
        self._kernels: dict[tuple[bool, bool], BindableKernel] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool().num_blocks

    @property
    def shared_bytes(self) -> int:
        return self._memory().num_bytes

    @property
    def kernel_specs(self) -> list[KernelSpec]:
        """The kernels that it launches: its own, and those of swapping for the ring."""
        piece_bytes = self._pool().piece_bytes
        return [*specs_of(piece_bytes), *copy_specs(piece_bytes)]

    def export(self) -> int:
        """Return a descriptor of the memory. Raises `HandoffFailed` as the contract says."""
        memory = self._memory()
        if not isinstance(memory, ShareableMemory):
            raise HandoffFailed("this card's memory cannot be shared")
        self._device.use()
        try:
            return memory.export()
        except GpuError as error:
            raise HandoffFailed(f"this card's memory cannot be shared: {error}") from error

    def open(self, descriptor: int, num_bytes: int, num_blocks: int) -> OpenedCache:
        """Map another cache. Raises `HandoffFailed` as the contract says."""
        self._device.use()
        try:
            memory = open_shareable(self._device, descriptor, num_bytes)
        except GpuError as error:
            raise HandoffFailed(f"the memory cannot be mapped: {error}") from error
        return OpenedCache(self._device, memory, num_blocks, self._wait_for_copies)

    def _wait_for_copies(self) -> None:
        for stream in list(self._copy_streams.values()):
            self._device.synchronize(stream)

    def begin_sums(self, layer: int, blocks: Sequence[int] | np.ndarray) -> _Moved:
        pool = self._pool()
        with _failing():
            self._device.use()
            self._layer_ends.after(layer, blocks).delay(self._sum_stream)
        return self._begin(
            pool, pool, layer, (blocks, blocks), self._sum_stream, is_copied=False, is_summed=True
        )

    def begin_copy(
        self,
        source: Any,
        layer: int,
        source_blocks: Sequence[int] | np.ndarray,
        blocks: Sequence[int] | np.ndarray,
        *,
        queue: int,
        is_behind_steps: bool,
        is_summed: bool,
    ) -> _Moved:
        here = self._pool()
        there = KVPool(source.memory.address, source.num_blocks, here.block_size, here.piece_bytes)
        with _failing():
            self._device.use()
            if queue not in self._copy_streams:
                self._copy_streams[queue] = self._device.stream(is_urgent=True)
            stream = self._copy_streams[queue]
            if is_behind_steps:
                before = self._device.event()
                before.record(self._compute)
                before.delay(stream)
                before.close()
        return self._begin(
            there, here, layer, (source_blocks, blocks), stream, is_copied=True, is_summed=is_summed
        )

    def use_ring(self, memory: np.ndarray) -> None:
        """Take the ring, and pin it; a slot is a block in any layer, since all are alike.

        Where the driver does not pin it, the card reaches it through buffers.
        """
        self._ring = memory.reshape(2, -1, self._pool().piece_bytes)
        with _failing():
            self._device.use()
        try:
            self._pinned_ring = self._device.register(int(memory.ctypes.data), memory.nbytes)
        except GpuError as error:
            _logger.warning("KV for other nodes is copied through buffers: %s", error)

    def close(self) -> None:
        """Unpin the ring's pages; no work that uses them may be queued or running."""
        if self._pinned_ring is not None:
            self._pinned_ring.close()

    def begin_out(self, layer: int, blocks: np.ndarray, slots: np.ndarray) -> _ThroughRing:
        ring = self._slots()
        with _failing():
            pinned, is_complete = self._out.begin_out(
                layer, blocks, ring, slots, behind=self._layer_ends.after(layer, blocks)
            )
        return _ThroughRing(is_complete, lambda: self._out.scatter(pinned, ring, slots))

    def begin_in(self, layer: int, slots: np.ndarray, blocks: np.ndarray) -> _ThroughRing:
        with _failing():
            gathered = self._in.gather(self._slots(), slots, blocks)
            is_complete = self._in.begin_in(layer, blocks, gathered)
        return _ThroughRing(is_complete, lambda: None)

    def _slots(self) -> np.ndarray:
        """Return the slots of the ring, uint8 `[2, num_slots, piece_bytes]`."""
        assert self._ring is not None
        return self._ring

    def _begin(
        self,
        source: KVPool,
        target: KVPool,
        layer: int,
        blocks: tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray],
        stream: int,
        *,
        is_copied: bool,
        is_summed: bool,
    ) -> _Moved:
        """Launch the kernel for these source and target blocks."""
        count, parts = len(blocks[0]), self._num_parts
        ids_bytes = -(-4 * count // _ALIGNMENT) * _ALIGNMENT
        sums_bytes = 2 * count * parts * _WORD_BYTES if is_summed else 0
        with _failing():
            buffer = self._buffers.take(2 * ids_bytes + sums_bytes)
            ids = buffer.bytes[: 2 * ids_bytes].view(np.int32).reshape(2, -1)
            ids[:, :count] = blocks
            sums = buffer.bytes[2 * ids_bytes : 2 * ids_bytes + sums_bytes].view(np.int64)
            self._device.use()
            form = (is_copied, is_summed)
            if form not in self._kernels:
                spec = _spec(self._pool().piece_bytes, *form)
                self._kernels[form] = self._make_kernel(spec)
            at = buffer.address
            self._kernels[form].bind(
                (count, parts, 2), source.keys(layer), at, target.keys(layer), at + ids_bytes,
                at + 2 * ids_bytes, source.num_blocks, target.num_blocks,
            )(stream)  # fmt: skip
            done = self._device.event()
            done.record(stream)
        shaped = sums.reshape(2, count, parts) if is_summed else None
        return _Moved(self._device, done, self._buffers, buffer, shaped)

    @property
    def _num_parts(self) -> int:
        return -(-self._pool().piece_bytes // (_WORD_BYTES * _PART_WORDS))


@contextmanager
def _failing() -> Iterator[None]:
    """Turn an error of the driver into one of a handoff."""
    try:
        yield
    except GpuError as error:
        raise HandoffFailed(f"the card failed: {error}") from error


def specs_of(piece_bytes: int) -> list[KernelSpec]:
    """Return the kernels for pieces of this size: copy and sum, copy, sum."""
    return [_spec(piece_bytes, *form) for form in ((True, True), (True, False), (False, True))]


def _spec(piece_bytes: int, is_copied: bool, is_summed: bool) -> KernelSpec:
    constants = {
        "WORDS": piece_bytes // _WORD_BYTES, "SIZE": _PART_WORDS, "IS_COPIED": is_copied,
        "IS_SUMMED": is_summed, "IS_PROGRAMMATIC": False,
    }  # fmt: skip
    return KernelSpec(copy_and_sum, _TYPES, constants)
