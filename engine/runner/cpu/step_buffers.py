"""The arrays of a step, allocated once for the largest one; each step uses their first rows."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from common.errors import InternalError

_LEAST_HUGE_BYTES = 4 << 20
"""Smaller buffers have pages of the usual size, as small arrays of numpy do."""


class StepBuffers:
    """Allocates the buffers of one back end, and keeps count of them."""

    def __init__(self) -> None:
        self.buffers: list[RowBuffer] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.num_bytes for buffer in self.buffers)

    def take(self) -> None:
        """Take all pages of the buffers, so that a measurement of the process counts them."""
        for buffer in self.buffers:
            buffer.take()

    def release(self) -> None:
        """Return all pages to the system, so that a node takes them as its steps become large."""
        for buffer in self.buffers:
            buffer.release()

    def rows(self, num_rows: int, width: int) -> RowBuffer:
        """Return a new float32 buffer of `num_rows` rows."""
        self.buffers.append(RowBuffer(num_rows, width))
        return self.buffers[-1]


class RowBuffer:
    """Memory for at most `num_rows` rows of `width` float32 values. It never grows."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.num_rows, self.width = num_rows, width
        self.num_bytes = num_rows * width * np.dtype(np.float32).itemsize
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, max(self.num_bytes, 1), flags=private)
        if self.num_bytes >= _LEAST_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # this system has no large pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._values = np.frombuffer(self._memory, np.uint8)[: self.num_bytes].view(np.float32)

    def take(self) -> None:
        """Take all pages now, instead of those that are written when they are; rows become zero."""
        self._values.fill(0.0)

    def release(self) -> None:
        """Return the pages to the system until rows are used again; the values become zeros."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)

    def first(self, num_rows: int, width: int | None = None) -> np.ndarray:
        """Return the first rows, `[num_rows, width]`, contiguous; their values are left over.

        A smaller `width` than the buffer's can be chosen. Raises `InternalError` for more rows, or
        wider ones, than the buffer has: a step is larger than the memory was planned for.
        """
        width = self.width if width is None else width
        if num_rows > self.num_rows or width > self.width:
            raise InternalError(
                f"a step buffer of {num_rows} rows of {width}: wanted at most {self.num_rows} "
                f"rows of {self.width}"
            )
        return self._values[: num_rows * width].reshape(num_rows, width)

    def copy_rows(self, source: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return these rows of `source` in the buffer; they must exist. Raises as `first` does."""
        out = self.first(len(rows), source.shape[1])
        # The default mode would check the indices again, and copy into an array of its own first.
        source.take(rows, axis=0, out=out, mode="clip")
        return out
