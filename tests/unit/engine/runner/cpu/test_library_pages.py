"""The pages of a library that is not needed any more."""

from __future__ import annotations

import sys
from pathlib import Path

import numba
import pytest

from engine.runner.cpu.library_pages import release_pages, unchanged_mappings

LLVM = "libllvmlite.so"
SMAPS = """\
7f0000000000-7f0000002000 r-xp 00001000 08:01 77                 /lib/libllvmlite.so
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0000002000-7f0000003000 r--p 00003000 08:01 77                 /lib/libllvmlite.so
Rss:                   4 kB
Anonymous:             4 kB
7f0000003000-7f0000004000 rw-p 00004000 08:01 77                 /lib/libllvmlite.so
Anonymous:             0 kB
7f0000005000-7f0000006000 r-xp 00004000 08:01 78                 /lib/another.so
Anonymous:             0 kB
7f0000007000-7f0000008000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f0000009000-7f000000a000 r--p 00000000 08:01 77                 /lib/libllvmlite.so
Anonymous:             0 kB
"""


def test_only_what_nobody_can_have_changed_is_released() -> None:
    places = list(unchanged_mappings(SMAPS, LLVM))
    assert places == [(0x7F0000000000, 0x7F0000002000), (0x7F0000009000, 0x7F000000A000)]


@pytest.mark.skipif(sys.platform != "linux", reason="the pages are counted in /proc")
def test_a_library_goes_on_working_without_its_pages() -> None:
    compiled(1)
    before = resident_kib()
    assert release_pages(LLVM) > 10 << 20
    assert resident_kib() < before / 2
    compiled(2)


def test_a_system_without_these_files_is_left_as_it_is(tmp_path: Path) -> None:
    assert release_pages(LLVM, tmp_path) == 0


def test_files_whose_names_are_no_text_may_be_mapped(tmp_path: Path) -> None:
    smaps = tmp_path / "proc/self/smaps"
    smaps.parent.mkdir(parents=True)
    smaps.write_bytes(SMAPS.encode().replace(b"another", b"m\xfcller"))
    assert release_pages("none.so", tmp_path) == 0


def compiled(added: int) -> None:
    """Compile a function with LLVM, and call it."""

    def add(value: int) -> int:
        return value + added

    assert numba.njit("int64(int64)")(add)(3) == 3 + added


def resident_kib() -> int:
    """Return how much of the library's file is in this process's memory."""
    resident, is_it = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_it = line.endswith(LLVM)
        elif is_it and name == "Rss:":
            resident += int(rest[0])
    return resident
