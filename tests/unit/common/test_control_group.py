"""What control groups leave a process of memory and cores."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from common.control_group import group_limit_bytes, num_cores
from tests.support.observing.control_groups import put_in_group
from tests.unit.tree import name_of, python_files

MIB = 1 << 20
MACHINE_SIZE = re.compile(r"\bcpu_count\b|\bsched_getaffinity\b")
"""How many cores there are, of which a container may have the time of fewer."""
UNLIMITED = "9223372036854771712"


@pytest.mark.parametrize(
    ("lines", "files", "wanted"),
    [
        pytest.param("0::/", {"sys/fs/cgroup/memory.max": str(9 * MIB)}, 9 * MIB, id="v2"),
        pytest.param("0::/", {"sys/fs/cgroup/memory.max": "max"}, None, id="v2 unlimited"),
        pytest.param("0::/", {}, None, id="v2 without the controller"),
        pytest.param(
            "0::/a/b",
            {
                "sys/fs/cgroup/memory.max": "max",
                "sys/fs/cgroup/a/memory.max": str(7 * MIB),
                "sys/fs/cgroup/a/b/memory.max": str(8 * MIB),
            },
            7 * MIB,
            id="v2 a group around it is smaller",
        ),
        pytest.param(
            "5:cpu,cpuacct:/a\n4:memory:/docker/x\n0::/a",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": str(6 * MIB),
            },
            6 * MIB,
            id="v1",
        ),
        pytest.param(
            # A container sees its own group as the root, and its path as the host has it.
            "4:memory,hugetlb:/docker/x",
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(5 * MIB)},
            5 * MIB,
            id="v1 inside",
        ),
        pytest.param("4:cpu:/a", {"sys/fs/cgroup/memory.max": "1"}, None, id="other controllers"),
    ],
)
def test_the_least_limit_of_the_groups(
    tmp_path: Path, lines: str, files: dict[str, str], wanted: int | None
) -> None:
    put_in_group(tmp_path, lines, files)
    assert group_limit_bytes(tmp_path) == wanted


def test_groups_whose_names_are_no_text(tmp_path: Path) -> None:
    group = Path("sys/fs/cgroup/" + os.fsdecode(b"m\xfcller"))
    for name in ("proc/self/cgroup", group / "memory.max"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/m\xfcller\n")
    (tmp_path / group / "memory.max").write_text(str(9 * MIB))
    assert group_limit_bytes(tmp_path) == 9 * MIB


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert group_limit_bytes(tmp_path) is None
    assert num_cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.covers("M01")
@pytest.mark.parametrize(
    ("lines", "files", "wanted"),
    [
        pytest.param("0::/", {"cpu.max": "200000 100000"}, 2, id="v2"),
        pytest.param("0::/", {"cpu.max": "max 100000"}, 8, id="v2 unlimited"),
        pytest.param("0::/", {"cpu.max": "1250000 50000"}, 8, id="more than there are"),
        pytest.param("0::/", {"cpu.max": "150000 100000"}, 2, id="a part of a core"),
        pytest.param("0::/", {"cpu.max": "1000 100000"}, 1, id="a small part of one"),
        pytest.param(
            "0::/a/b",
            {"cpu.max": "max 100000", "a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"},
            3,
            id="v2 a group around it has a limit",
        ),
        pytest.param(
            "5:cpu,cpuacct:/docker/x\n0::/",
            {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"},
            4,
            id="v1 inside",
        ),
        pytest.param(
            "1:cpu:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            8,
            id="v1 unlimited",
        ),
        pytest.param("3:cpuset:/", {"cpu.max": "100000 100000"}, 8, id="other controllers"),
    ],
)
def test_cores_whose_time_is_limited(
    tmp_path: Path,
    lines: str,
    files: dict[str, str],
    wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    put_in_group(tmp_path, lines, {f"sys/fs/cgroup/{name}": one for name, one in files.items()})
    assert num_cores(tmp_path) == wanted


def test_numbers_of_threads_and_processes_follow_what_a_container_may_use() -> None:
    """What is not asked of `control_group` ignores them."""
    elsewhere = ("tests/", "bench/", "tools/")
    sizing = [
        name_of(path)
        for path in python_files()
        if not name_of(path).startswith(elsewhere) and MACHINE_SIZE.search(path.read_text())
    ]
    assert sizing == ["common/control_group.py"]
