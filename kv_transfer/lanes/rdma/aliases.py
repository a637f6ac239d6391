"""Further addresses for memory that is mapped already, none of which is used twice.

RDMA writers name their target by its address in the receiver's process. Memory that must be out of
their reach for good is given to later writers under another address.

A mapping of shared memory (`MAP_SHARED`, an anonymous file) can be mapped once more; private memory
cannot. The addresses of an alias that is dropped stay reserved until all are closed, otherwise the
system could use them again. A reservation takes no memory; a mapping that was pinned keeps its page
tables, a five-hundredth of the memory with pages of 4 KiB.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mremap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_FAILED = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE = 1
_PROT_NONE = 0
_MAP_FIXED = 0x10


class Aliases:
    """Aliases of `num_bytes` at `address`, as many as the process has addresses for."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._offset = address % mmap.PAGESIZE
        self._start = address - self._offset
        self._num_bytes = self._offset + num_bytes
        self._made: list[int] = []

    def make(self) -> int:
        """Return a new address of the same memory. Raises `OSError`."""
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

    def drop(self, address: int) -> None:
        """Unmap the alias that `make` returned, which nobody uses; keep its addresses reserved."""
        # Memory that nobody may touch counts against no limit of the system.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _LIBC.mmap(address - self._offset, self._num_bytes, _PROT_NONE, flags, -1, 0)

    def close(self) -> None:
        """Unmap all of them. Idempotent."""
        for start in self._made:
            _LIBC.munmap(start, self._num_bytes)
        self._made.clear()
