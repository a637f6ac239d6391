"""Further addresses for memory that is mapped already, none of which is used twice.

RDMA writers name their target by its address in the receiver's process. Memory that must be out of
their reach for good is given to later writers under another address.

A mapping of shared memory (`MAP_SHARED`, an anonymous file) can be mapped once more; private memory
cannot. The aliases stay mapped, though unused, until all are closed: otherwise the system could
reuse their addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mremap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE = 1


class Aliases:
    """Aliases of `num_bytes` at `address`, at most `max_count` in all."""

    def __init__(self, address: int, num_bytes: int, *, max_count: int) -> None:
        self._offset = address % mmap.PAGESIZE
        self._start = address - self._offset
        self._num_bytes = self._offset + num_bytes
        self._max_count = max_count
        self._made: list[int] = []

    def make(self) -> int:
        """Return a new address of the same memory. Raises `OSError`."""
        if len(self._made) >= self._max_count:
            raise OSError(f"the memory has {self._max_count} further addresses already")
        start = _LIBC.mremap(
            ctypes.c_void_p(self._start),
            ctypes.c_size_t(0),  # The old mapping stays.
            ctypes.c_size_t(self._num_bytes),
            ctypes.c_int(_MREMAP_MAYMOVE),
        )
        if start is None or start == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"memory cannot be mapped again: {os.strerror(code)}")
        self._made.append(start)
        return int(start) + self._offset

    def close(self) -> None:
        """Unmap all of them. Idempotent."""
        for start in self._made:
            _LIBC.munmap(start, self._num_bytes)
        self._made.clear()
