"""Map a file in memory so that the kernel may use pages of 2 MiB for it.

A transfer touches memory that has not been used recently. With pages of 4 KiB address translation
takes a third of its time. The kernel uses large pages only if the address and the offset in the
file agree modulo the large page, which the standard library cannot ask for.

Without large pages the memory is the same, only slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 << 20

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_FAILED = ctypes.c_void_p(-1).value
# Linux constants; the standard library has no names for them.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_COLLAPSE = 25


class FileMapping:
    """The first `num_bytes` of a file, shared. `memory`: uint8 `[num_bytes]`.

    Unmapped when this object and all arrays made of `memory` are gone. Raises `OSError`.
    """

    def __init__(self, fd: int, num_bytes: int, *, is_writable: bool) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        # A range of addresses to choose from; unmapped with this object, with all mapped there.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._addresses = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags, prot)
        whole = np.frombuffer(self._addresses, np.uint8)
        first = whole.ctypes.data
        self._start = -first % HUGE_PAGE_BYTES
        address = first + self._start
        found = _LIBC.mmap(address, num_bytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if found == _FAILED or found is None:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.memory: npt.NDArray[np.uint8] = whole[self._start : self._start + num_bytes]

    def advise(self, option: int) -> None:
        """Apply `madvise` to all of it. Raises `OSError`."""
        self._addresses.madvise(option, self._start, self.memory.size)

    def want_huge_pages(self) -> None:
        """Use huge pages for memory that is touched from now on, where the system allows it."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self.advise(mmap.MADV_HUGEPAGE)

    def join_pages(self) -> None:
        """Convert memory that was touched before to huge pages. About half a second per GiB."""
        with contextlib.suppress(OSError):  # Linux before 6.1 does not support it.
            self.advise(_MADV_COLLAPSE)
