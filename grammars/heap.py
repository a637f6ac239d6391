"""How much memory a process has allocated, to weigh what an action leaves behind."""

from __future__ import annotations

import ctypes
import resource
from functools import cache
from pathlib import Path
from typing import Any

_M_ARENA_MAX = -8
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


@cache
def _mallinfo() -> Any:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Mallinfo
    return found


def allocated_bytes() -> int:
    """Return the bytes that the C heap has given out, or the resident set without glibc 2.33."""
    mallinfo = _mallinfo()
    if mallinfo is not None:
        taken = mallinfo()
        return int(taken.uordblks + taken.hblkhd)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def use_one_arena() -> None:
    """Let all threads of this process use one heap: each further one reserves 64 MiB or more."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
