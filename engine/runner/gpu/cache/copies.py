"""KV blocks between the card and pinned memory, beside the steps: a `device_copies.DeviceSide`.

One kernel moves all blocks of a layer between their places in the pool and pinned memory, where
they lie together, on a stream of its own. A thread copies between pinned memory and the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.runner.cache.device_copies import IsComplete
from engine.runner.gpu.cache.pinned import PinnedBuffer, PinnedBuffers
from engine.runner.gpu.cuda_driver import Device, Event
from engine.runner.gpu.kernels.gathering import copy_blocks
from engine.runner.gpu.launcher import BindableKernel, KernelSpec
from engine.runner.gpu.launches import KVPool

_TYPES = {
    "pool": "*i64", "block_ids": "*i32", "packed": "*i64", "num_blocks": "i32", "num_ids": "i32",
}  # fmt: skip
_WORD_BYTES = 8
_PART_WORDS = 2048
"""Words of a block that one program copies: 16 KiB."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Blocks of one layer in pinned memory: their ids, then [2, blocks, piece_bytes]."""

    buffer: PinnedBuffer
    num_ids: int
    start: int
    piece_bytes: int

    @property
    def pieces(self) -> np.ndarray:
        """uint8 `[2, blocks, piece_bytes]`, writable."""
        end = self.start + 2 * self.num_ids * self.piece_bytes
        return self.buffer.bytes[self.start : end].reshape(2, self.num_ids, self.piece_bytes)


class CardSide:
    """Copies of one cache, queued after the steps on `compute_stream`."""

    def __init__(
        self,
        device: Device,
        make_kernel: Callable[[KernelSpec], BindableKernel],
        pool: Callable[[], KVPool],
        compute_stream: int,
    ) -> None:
        self._device, self._pool, self._compute = device, pool, compute_stream
        self._make_kernel = make_kernel
        self._kernels: dict[bool, BindableKernel] = {}
        self._stream = device.stream()
        self._buffers = PinnedBuffers(device)

    def gather(self, host: np.ndarray, host_ids: np.ndarray, block_ids: np.ndarray) -> Packed:
        packed = self._take(block_ids)
        packed.pieces[:] = host[:, host_ids]
        return packed

    def begin_in(self, layer: int, block_ids: np.ndarray, gathered: Packed) -> IsComplete:
        done = self._queue(layer, gathered, is_out=False)

        def is_complete() -> bool:
            if not self._has_ended(done):
                return False
            self._buffers.give_back(gathered.buffer)
            return True

        return is_complete

    def begin_out(self, layer: int, block_ids: np.ndarray) -> tuple[Packed, IsComplete]:
        packed = self._take(block_ids)
        done = self._queue(layer, packed, is_out=True)
        return packed, lambda: self._has_ended(done)

    def scatter(self, pinned: Packed, host: np.ndarray, host_ids: np.ndarray) -> None:
        host[:, host_ids] = pinned.pieces
        self._buffers.give_back(pinned.buffer)

    def _take(self, block_ids: np.ndarray) -> Packed:
        count, piece_bytes = len(block_ids), self._pool().piece_bytes
        start = -(-4 * count // 256) * 256
        buffer = self._buffers.take(start + 2 * count * piece_bytes)
        buffer.bytes[: 4 * count] = np.asarray(block_ids, np.int32).view(np.uint8)
        return Packed(buffer, count, start, piece_bytes)

    def _queue(self, layer: int, packed: Packed, *, is_out: bool) -> Event:
        """Queue a copy after the steps that are queued; return what shows its end."""
        device, pool = self._device, self._pool()
        device.use()
        before = device.event()
        before.record(self._compute)
        before.delay(self._stream)
        before.close()
        words = pool.piece_bytes // _WORD_BYTES
        if is_out not in self._kernels:
            constants = {
                "WORDS": words, "SIZE": _PART_WORDS, "IS_OUT": is_out, "IS_PROGRAMMATIC": False,
            }  # fmt: skip
            self._kernels[is_out] = self._make_kernel(KernelSpec(copy_blocks, _TYPES, constants))
        address = packed.buffer.address
        self._kernels[is_out].bind(
            (packed.num_ids, -(-words // _PART_WORDS), 2), pool.keys(layer), address,
            address + packed.start, pool.num_blocks, packed.num_ids,
        )(self._stream)  # fmt: skip
        done = device.event()
        done.record(self._stream)
        return done

    def _has_ended(self, done: Event) -> bool:
        """Return whether a copy has ended, once; any thread may ask."""
        self._device.use()
        if not done.is_reached():
            return False
        done.close()
        return True
