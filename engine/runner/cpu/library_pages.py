"""Return the pages of a library that was needed only for a while, such as LLVM's for the kernels.

numba loads LLVM's library, over 100 MB, to compile kernels and to link compiled ones. Computing
needs none of it, but its pages count as memory of the process until the system runs short of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ +(/.*)")


def release_pages(library: str, root: Path = Path("/")) -> int:
    """Return the unchanged pages of a library to the system; it reads them again when needed.

    `library` is the name of the file. Return the bytes of the mappings. Mappings that can be
    written or hold changed pages, such as relocated tables, stay. Without Linux's `/proc` nothing
    is done.
    """
    num_bytes = 0
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        # Files that are mapped may have any bytes in their names.
        smaps = (root / "proc/self/smaps").read_text(errors="surrogateescape")
        for start, end in unchanged_mappings(smaps, library):
            if madvise(start, end - start, mmap.MADV_DONTNEED) == 0:
                num_bytes += end - start
    return num_bytes


def unchanged_mappings(smaps: str, library: str) -> Iterator[tuple[int, int]]:
    """Return where a library is mapped and nothing of it was changed: start and end addresses."""
    place: tuple[int, int] | None = None
    for line in smaps.splitlines():
        found = _MAPPING.fullmatch(line)
        if found:
            is_it = "w" not in found[3] and Path(found[4]).name == library
            place = (int(found[1], 16), int(found[2], 16)) if is_it else None
        elif line.startswith("Anonymous:") and place is not None and line.split()[1] == "0":
            yield place
