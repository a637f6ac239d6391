"""KV blocks between the card and the host, beside the steps: a `device_copies.DeviceSide`.

One kernel moves all blocks of a layer on a stream of its own. Pinned host memory is read and
written in place; other memory is reached through pinned buffers, which a thread fills and empties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.runner.cache.device_copies import IsComplete
from engine.runner.gpu.cache.pinned import PinnedBuffer, PinnedBuffers
from engine.runner.gpu.cuda_driver import Device, Event, Memory
from engine.runner.gpu.kernels.gathering import copy_blocks
from engine.runner.gpu.launcher import BindableKernel, KernelSpec
from engine.runner.gpu.launches import KVPool

_TYPES = {
    "pool": "*i64", "block_ids": "*i32", "host": "*i64", "host_ids": "*i32", "num_blocks": "i32",
    "num_host_blocks": "i32",
}  # fmt: skip
_WORD_BYTES = 8
_PART_WORDS = 2048
"""Words of a block that one program copies: 16 KiB."""
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class PinnedBlocks:
    """A layer's blocks as the card reaches them: `host` [2, num_host_blocks, piece_bytes].

    `buffer` begins with the ids of blocks and, from `host_ids` on, those of host blocks. `pieces`
    are the blocks in it, uint8 `[2, blocks, piece_bytes]`; None: the host's memory is pinned.
    """

    buffer: PinnedBuffer
    num_ids: int
    host_ids: int
    host: int
    num_host_blocks: int
    pieces: np.ndarray | None


class CardSide:
    """Copies of one cache, queued after the steps on `compute_stream`."""

    def __init__(
        self,
        device: Device,
        make_kernel: Callable[[KernelSpec], BindableKernel],
        pool: Callable[[], KVPool],
        compute_stream: int,
        buffers: PinnedBuffers,
        pinned: Callable[[], Memory | None] = lambda: None,
    ) -> None:
        """Take `pinned`, which returns the host memory that the card reaches, or None."""
        self._device, self._pool, self._pinned = device, pool, pinned
        self._compute, self._make_kernel = compute_stream, make_kernel
        self._kernels: dict[bool, BindableKernel] = {}
        self._stream, self._buffers = device.stream(), buffers

    def gather(self, host: np.ndarray, host_ids: np.ndarray, block_ids: np.ndarray) -> PinnedBlocks:
        blocks = self._take(block_ids, host, host_ids)
        if blocks.pieces is not None:
            blocks.pieces[:] = host[:, host_ids]
        return blocks

    def begin_in(self, layer: int, block_ids: np.ndarray, gathered: PinnedBlocks) -> IsComplete:
        done = self._queue(layer, gathered, is_out=False)

        def is_complete() -> bool:
            if not self._has_ended(done):
                return False
            self._buffers.give_back(gathered.buffer)
            return True

        return is_complete

    def begin_out(
        self, layer: int, block_ids: np.ndarray, host: np.ndarray, host_ids: np.ndarray,
        behind: Event | None = None,
    ) -> tuple[PinnedBlocks, IsComplete]:  # fmt: skip
        """See `DeviceSide`; after `behind` if it is given, and not after all steps."""
        blocks = self._take(block_ids, host, host_ids)
        done = self._queue(layer, blocks, is_out=True, behind=behind)
        return blocks, lambda: self._has_ended(done)

    def scatter(self, pinned: PinnedBlocks, host: np.ndarray, host_ids: np.ndarray) -> None:
        if pinned.pieces is not None:
            host[:, host_ids] = pinned.pieces
        self._buffers.give_back(pinned.buffer)

    def _take(self, block_ids: np.ndarray, host: np.ndarray, host_ids: np.ndarray) -> PinnedBlocks:
        """Return how the card reaches these blocks of the host."""
        count, piece_bytes = len(block_ids), self._pool().piece_bytes
        ids_bytes = -(-4 * count // _ALIGNMENT) * _ALIGNMENT
        place = self._address_of(host)
        num_bytes = 0 if place else 2 * count * piece_bytes
        buffer = self._buffers.take(2 * ids_bytes + num_bytes)
        ids = buffer.bytes[: 2 * ids_bytes].view(np.int32)
        ids[:count] = block_ids
        ids[ids_bytes // 4 : ids_bytes // 4 + count] = host_ids if place else range(count)
        if place:
            return PinnedBlocks(buffer, count, ids_bytes, place, host.shape[1], None)
        pieces = buffer.bytes[2 * ids_bytes : 2 * ids_bytes + num_bytes]
        start = buffer.address + 2 * ids_bytes
        pieces = pieces.reshape(2, count, piece_bytes)
        return PinnedBlocks(buffer, count, ids_bytes, start, count, pieces)

    def _address_of(self, host: np.ndarray) -> int:
        """Return the card's address of this memory; 0 if it is not pinned."""
        pinned = self._pinned()
        if pinned is None:
            return 0
        offset = int(host.ctypes.data) - pinned.host
        is_inside = offset >= 0 and offset + host.nbytes <= pinned.num_bytes
        return pinned.address + offset if is_inside else 0

    def _queue(
        self, layer: int, blocks: PinnedBlocks, *, is_out: bool, behind: Event | None = None
    ) -> Event:
        """Queue a copy after the queued steps, or `behind`; return the event of its end."""
        device, pool = self._device, self._pool()
        device.use()
        if behind is not None:
            behind.delay(self._stream)
        else:
            before = device.event()
            before.record(self._compute)
            before.delay(self._stream)
            before.close()
        if is_out not in self._kernels:
            self._kernels[is_out] = self._make_kernel(_spec(pool.piece_bytes, is_out))
        num_parts = -(-pool.piece_bytes // (_WORD_BYTES * _PART_WORDS))
        ids = blocks.buffer.address
        self._kernels[is_out].bind(
            (blocks.num_ids, num_parts, 2), pool.keys(layer), ids, blocks.host,
            ids + blocks.host_ids, pool.num_blocks, blocks.num_host_blocks,
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


def copy_specs(piece_bytes: int) -> list[KernelSpec]:
    """Return the kernels for pieces of this size: in, out."""
    return [_spec(piece_bytes, is_out) for is_out in (False, True)]


def _spec(piece_bytes: int, is_out: bool) -> KernelSpec:
    constants = {
        "WORDS": piece_bytes // _WORD_BYTES, "SIZE": _PART_WORDS, "IS_OUT": is_out,
        "IS_PROGRAMMATIC": False,
    }  # fmt: skip
    return KernelSpec(copy_blocks, _TYPES, constants)
