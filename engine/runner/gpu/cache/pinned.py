"""Buffers of pinned host memory for reuse: the driver takes milliseconds to pin memory.

A cache has one owner of all of it but the ring: swapped blocks pass through it, and ids and sums of
every other copy lie in it.
"""

from __future__ import annotations

import threading

from engine.runner.gpu.cuda_driver import Device, Memory

MOST_FREE_BYTES = 512 << 20
"""Most bytes of free buffers that are kept; beyond that the largest ones are freed."""


class PinnedBuffer:
    """Pinned memory; `bytes` is the host's view and `address` the card's."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.address = memory, memory.address
        self.bytes = memory.host_bytes()


class PinnedBuffers:
    """Lends pinned buffers; any thread may take one and give it back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[PinnedBuffer]] = {}
        self._lock = threading.Lock()
        self._free_bytes = 0

    def take(self, num_bytes: int) -> PinnedBuffer:
        """Return a buffer of at least `num_bytes`, not initialised."""
        size = 1 << (num_bytes - 1).bit_length()
        with self._lock:
            free = self._free.setdefault(size, [])
            if free:
                self._free_bytes -= size
                return free.pop()
        self._device.use()
        return PinnedBuffer(self._device.allocate_pinned(size))

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Take a buffer back; no copy may read or write it any more."""
        size, surplus = buffer.memory.num_bytes, list[PinnedBuffer]()
        with self._lock:
            self._free[size].append(buffer)
            self._free_bytes += size
            while self._free_bytes > MOST_FREE_BYTES:
                # Small ones stay: every copy takes one, and few copies take a large one.
                largest = max(one for one, free in self._free.items() if free)
                surplus.append(self._free[largest].pop())
                self._free_bytes -= largest
        if surplus:
            self._device.use()
        for buffer in surplus:
            buffer.memory.close()
