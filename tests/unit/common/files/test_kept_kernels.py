"""Compiled kernels are loaded by every copy of the files that they were compiled from."""

from __future__ import annotations

import os
import subprocess
import sys
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
_CALL = (
    "import kernels; print(kernels.increased(1), sum(kernels.increased.stats.cache_hits.values()))"
)
_READ_ONLY = """
import errno, tempfile

def refused(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")

tempfile.TemporaryFile = refused  # numba tries a folder with it
"""
THERE = Path(__file__).parents[4]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    environment = {**os.environ, "PDSERVE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(THERE)}
    environment.pop("NUMBA_CACHE_DIR", None)
    return environment


def result_and_hits(
    folder: Path, environment: dict[str, str], *, step: int = 1, fact: int = 0
) -> list[int]:
    """Have a process of a copy in `folder` call its kernel with 1."""
    folder.mkdir(exist_ok=True)
    (folder / "kernels.py").write_text(_KERNELS.format(step=step, fact=fact))
    run = subprocess.run(
        [sys.executable, "-c", _CALL],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    )
    return [int(word) for word in run.stdout.split()]


def test_a_copy_elsewhere_loads_them_and_changed_files_do_not(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert result_and_hits(here, environment) == [2, 0]
    assert result_and_hits(there, environment) == [2, 1]
    assert result_and_hits(there, environment, step=2) == [3, 0]
    assert result_and_hits(here, environment) == [2, 1]
    assert result_and_hits(here, environment, fact=1) == [2, 0]


def test_where_nothing_can_be_kept_they_are_compiled(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "cache").write_text("no folder")
    for _ in range(2):
        assert result_and_hits(tmp_path / "here", environment) == [2, 0]
    assert list(tmp_path.rglob("*.nbi")) == [], "nor beside the sources, where no one looks"


@pytest.mark.covers("M03")
def test_a_folder_that_can_only_be_read_is_read(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    here = tmp_path / "here"
    assert result_and_hits(here, environment) == [2, 0]
    read_only = environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(THERE)])}
    (tmp_path / "sitecustomize.py").write_text(_READ_ONLY)
    assert result_and_hits(here, read_only) == [2, 1]
    assert result_and_hits(here, read_only, step=2) == [3, 0]
    assert result_and_hits(here, environment, step=2) == [3, 0], "it was kept"
