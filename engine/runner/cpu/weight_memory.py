"""Memory for packed weights, in pages of 2 MiB where the system has them.

A step reads every weight once. With pages of 4 KiB address translation takes a tenth of its time,
and the processor's prefetching stops at every page end. Weights are placed consecutively in large
chunks, so that small ones share large pages.

Without large pages the memory is the same, only slower.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 32 << 20
"""The unused end of the last chunk is never touched, so it takes no memory."""
_ALIGNMENT_BYTES = 64


class WeightMemory:
    """Allocates arrays of zeros, which live as long as they are used. Not thread-safe."""

    def __init__(self) -> None:
        self._chunk = np.zeros(0, np.uint8)
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:
        """Return zeros that start on a cache line, so that no vector crosses two lines."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > self._chunk.size:
            self._chunk, self._used = _chunk(max(num_bytes, _CHUNK_BYTES)), 0
        start = self._used
        self._used += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._chunk[start : start + num_bytes].view(dtype).reshape(shape)


def _chunk(num_bytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # this system has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]
