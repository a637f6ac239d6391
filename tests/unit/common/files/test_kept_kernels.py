"""Compiled kernels are loaded by every copy of the files that they were compiled from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_KERNELS = """
from pathlib import Path
from numba import njit
from numba.core import caching
from common.files.code_cache import keep_compiled

keep_compiled(caching, Path(__file__).parent, {fact})

@njit("int64(int64)", cache=True)
def increased(number):
    return number + {step}
"""
_CALLS = """
import json, os, sys
import numba

sys.dont_write_bytecode = True  # a file that changes within a second would be loaded as it was
for line in sys.stdin:
    folder, cache, before = json.loads(line)
    if os.fork():
        _, status = os.wait()
        if status:
            print("failed", flush=True)
        continue
    os.environ["PDSERVE_CACHE"] = cache
    os.environ.pop("NUMBA_CACHE_DIR", None)
    sys.path.insert(0, folder)
    exec(before)
    import kernels
    result = kernels.increased(1)
    print(result, sum(kernels.increased.stats.cache_hits.values()), flush=True)
    os._exit(0)
"""
"""Each call in a process of its own, forked from one that has imported numba: that takes several
times as long as a call."""
_READ_ONLY = """
import errno, tempfile

def refused(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")

tempfile.TemporaryFile = refused  # numba tries a folder with it
"""
THERE = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def calls() -> Iterator[subprocess.Popen[str]]:
    """What forks a process for each call."""
    with subprocess.Popen(
        [sys.executable, "-c", _CALLS],
        env={**os.environ, "PYTHONPATH": str(THERE)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process


class Copies:
    """Copies of a package with one kernel, which keep what is compiled in one cache folder."""

    def __init__(self, calls: subprocess.Popen[str], cache: Path) -> None:
        self._calls = calls
        self.cache = cache

    def result_and_hits(
        self, folder: Path, *, step: int = 1, fact: int = 0, before: str = ""
    ) -> list[int]:
        """Have a process of the copy in `folder` call its kernel with 1; it runs `before` first."""
        folder.mkdir(exist_ok=True)
        (folder / "kernels.py").write_text(_KERNELS.format(step=step, fact=fact))
        call = json.dumps([str(folder), str(self.cache), before])
        print(call, file=self._calls.stdin, flush=True)
        assert self._calls.stdout is not None
        return [int(word) for word in self._calls.stdout.readline().split()]


@pytest.fixture
def copies(calls: subprocess.Popen[str], tmp_path: Path) -> Copies:
    return Copies(calls, tmp_path / "cache")


def test_a_copy_elsewhere_loads_them_and_changed_files_do_not(
    tmp_path: Path, copies: Copies
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert copies.result_and_hits(here) == [2, 0]
    assert copies.result_and_hits(there) == [2, 1]
    assert copies.result_and_hits(there, step=2) == [3, 0]
    assert copies.result_and_hits(here) == [2, 1]
    assert copies.result_and_hits(here, fact=1) == [2, 0]


def test_where_nothing_can_be_kept_they_are_compiled(tmp_path: Path, copies: Copies) -> None:
    copies.cache.write_text("no folder")
    for _ in range(2):
        assert copies.result_and_hits(tmp_path / "here") == [2, 0]
    assert list(tmp_path.rglob("*.nbi")) == [], "nor beside the sources, where no one looks"


@pytest.mark.covers("M03")
def test_a_folder_that_can_only_be_read_is_read(tmp_path: Path, copies: Copies) -> None:
    here = tmp_path / "here"
    assert copies.result_and_hits(here) == [2, 0]
    assert copies.result_and_hits(here, before=_READ_ONLY) == [2, 1]
    assert copies.result_and_hits(here, step=2, before=_READ_ONLY) == [3, 0]
    assert copies.result_and_hits(here, step=2) == [3, 0], "it was kept"


@pytest.mark.covers("M04")
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize(
    "spoilt",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: bytes(len(content)),
        lambda content: b"\xb1" + content[1:],
    ],
    ids=["empty", "cut off", "zeros", "other bytes"],
)
def test_a_file_that_is_broken_is_compiled_again(
    tmp_path: Path, copies: Copies, ending: str, spoilt: Callable[[bytes], bytes]
) -> None:
    """A machine that lost its power leaves such files, or a disk that was full."""
    here = tmp_path / "here"
    assert copies.result_and_hits(here) == [2, 0]
    (file,) = copies.cache.rglob(f"*.{ending}")
    file.write_bytes(spoilt(file.read_bytes()))
    assert copies.result_and_hits(here) == [2, 0]
    assert copies.result_and_hits(here) == [2, 1], "it was kept whole"
