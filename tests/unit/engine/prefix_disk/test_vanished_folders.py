"""A node's folder that vanishes, or is replaced, under the node: it writes to no other node's."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.core.blocks.disk_jobs import DiskFailure, DiskLook, DiskResult, DiskWrite
from engine.prefix_disk.block_folder import BlockFolder
from engine.prefix_disk.file_calls import FileCalls
from tests.support.disk.faulty_files import FaultyCalls
from tests.support.disk.written_blocks import files, hash_of, read, write

MODEL = "f" * 16
LOOK = DiskLook(is_all=True)
GLANCE = DiskLook(is_all=False)


def host() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 2, 8, 1000), np.uint8)


def opened(path: Path, memory: np.ndarray, calls: FileCalls | None = None) -> BlockFolder:
    made = BlockFolder(path / "d", MODEL, memory, calls or FaultyCalls())
    assert made.look(LOOK).failure is None
    return made


def names(path: Path) -> list[str]:
    """The folders of nodes that have files, one for each file."""
    return sorted(one.parent.parent.name for one in files(path))


def remove(path: Path) -> None:
    for one in sorted(path.rglob("*"), reverse=True):
        one.rmdir() if one.is_dir() else one.unlink()
    path.rmdir()


def vanish(path: Path) -> None:
    remove(path / "d")


def move_all(path: Path) -> None:
    (path / "d").rename(path / "away")


def move_own(path: Path) -> None:
    (path / "d" / "node-0").rename(path / "away")


def lose_lock(path: Path) -> None:
    (path / "d" / "node-0" / ".lock").unlink()


def link_own(path: Path) -> None:
    move_own(path)
    (path / "d" / "node-0").symlink_to(path / "away")


def link_model(path: Path) -> None:
    (path / "d" / "node-0" / MODEL).rename(path / "away")
    (path / "d" / "node-0" / MODEL).symlink_to(path / "away")


def remove_model(path: Path) -> None:
    remove(path / "d" / "node-0" / MODEL)


def file_for_own(path: Path) -> None:
    move_own(path)
    (path / "d" / "node-0").write_text("a file")


def file_for_all(path: Path) -> None:
    vanish(path)
    (path / "d").write_text("a file")


def file_for_model(path: Path) -> None:
    remove_model(path)
    (path / "d" / "node-0" / MODEL).write_text("a file")


def another_lock(path: Path) -> None:
    lose_lock(path)
    (path / "d" / "node-0" / ".lock").touch()


FAULTS = [
    vanish, move_all, move_own, lose_lock, link_own, link_model, remove_model, file_for_own,
    file_for_all, file_for_model, another_lock,
]  # fmt: skip


@pytest.mark.parametrize("is_seen_by_look", [False, True], ids=["write", "look"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_whose_folder_is_gone_writes_nowhere(
    fault: Callable[[Path], None], is_seen_by_look: bool, tmp_path: Path
) -> None:
    memory = host()
    disk = opened(tmp_path, memory)
    write(disk, 0)
    fault(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    if is_seen_by_look:
        assert disk.look(GLANCE).failure is DiskFailure.ERROR
    result = write(disk, 1)
    assert (result.num_done, result.failure) == (0, DiskFailure.ERROR)
    assert sorted(tmp_path.rglob("*")) == before
    assert disk.look(GLANCE).failure is None, "it has none that could be lost again"


@pytest.mark.parametrize("fault", [one for one in FAULTS if one is not file_for_all])
def test_it_has_a_folder_again_after_the_next_whole_look(
    fault: Callable[[Path], None], tmp_path: Path
) -> None:
    memory = host()
    disk = opened(tmp_path, memory)
    write(disk, 0)
    fault(tmp_path)
    write(disk, 1)
    found = disk.look(LOOK)
    assert found.failure is None
    assert write(disk, 2) == DiskResult(1)
    assert set(disk.look(LOOK).scan.own) == {*found.scan.own, hash_of(2)}
    assert read(disk, 2, 5) == DiskResult(1)
    assert np.array_equal(memory[:, :, 5], memory[:, :, 2])
    is_taken = fault in (link_own, link_model, file_for_own, file_for_model)
    home = tmp_path / "d" / ("node-1" if is_taken else "node-0") / MODEL
    assert (home / f"{hash_of(2).hex()}.kv").exists()
    assert home.resolve() == home


@pytest.mark.parametrize("fault", [vanish, move_all, move_own, lose_lock])
def test_two_nodes_never_have_one_folder(fault: Callable[[Path], None], tmp_path: Path) -> None:
    first = opened(tmp_path, host())
    write(first, 0)
    fault(tmp_path)
    second = opened(tmp_path, host())
    write(second, 1)
    before = names(tmp_path)
    assert set(before) == {"node-0"}
    first.write(DiskWrite([], [], [hash_of(1)]))  # which removes what the second one wrote, if any
    assert names(tmp_path) == before
    assert write(first, 2, 3).num_done == 0
    assert names(tmp_path) == before
    assert first.look(LOOK).scan.own == ()
    assert write(first, 2, 3) == DiskResult(2)
    assert write(second, 4) == DiskResult(1)
    assert names(tmp_path) == sorted([*before, "node-0", "node-1", "node-1"])


def test_a_folder_that_was_away_and_is_back_is_still_its_node_s(tmp_path: Path) -> None:
    disk = opened(tmp_path, host())
    write(disk, 0)
    move_all(tmp_path)
    (tmp_path / "away").rename(tmp_path / "d")
    assert disk.look(GLANCE).failure is None
    assert write(disk, 1) == DiskResult(1)
    assert set(disk.look(LOOK).scan.own) == {hash_of(0), hash_of(1)}


def test_a_folder_that_is_back_when_another_one_has_its_place(tmp_path: Path) -> None:
    first = opened(tmp_path, host())
    write(first, 0)
    move_all(tmp_path)
    second = opened(tmp_path, host())
    write(second, 1)
    vanish(tmp_path)
    (tmp_path / "away").rename(tmp_path / "d")
    assert write(second, 2).num_done == 0, "it is the first one's"
    assert write(first, 3) == DiskResult(1)
    assert second.look(LOOK).scan.own == ()
    assert write(second, 2) == DiskResult(1)
    assert names(tmp_path) == ["node-0", "node-0", "node-1"]


def test_a_lock_in_a_folder_that_vanishes_meanwhile_is_none(tmp_path: Path) -> None:
    class Vanishing(FileCalls):
        def lock(self, path: Path) -> int | None:
            fd = super().lock(path)
            path.unlink()
            return fd

    found = BlockFolder(tmp_path / "d", MODEL, host(), Vanishing()).look(LOOK)
    assert found.failure is DiskFailure.ERROR
    assert "was removed or replaced" in found.why


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_is_made_read_only_stays_its_node_s(number: int, tmp_path: Path) -> None:
    memory, calls = host(), FaultyCalls()
    disk = opened(tmp_path, memory, calls)
    write(disk, 0)
    calls.fault = lambda called: number if called in ("open_new", "remove", "rename") else None
    assert write(disk, 1).failure is DiskFailure.ERROR
    assert disk.look(GLANCE).failure is None
    assert read(disk, 0, 5) == DiskResult(1)
    assert BlockFolder(tmp_path / "d", MODEL, memory).look(LOOK).scan.others == {
        hash_of(0): "node-0"
    }
    calls.fault = lambda called: None
    assert write(disk, 1) == DiskResult(1)
    assert names(tmp_path) == ["node-0", "node-0"]


def test_a_folder_that_this_user_may_not_use_is_passed_over(tmp_path: Path) -> None:
    class Forbidden(FileCalls):
        def lock(self, path: Path) -> int | None:
            if path.parent.name == "node-0":
                raise PermissionError(errno.EACCES, "forbidden", str(path))
            return super().lock(path)

    disk = opened(tmp_path, host(), Forbidden())
    assert write(disk, 0) == DiskResult(1)
    assert names(tmp_path) == ["node-1"]


def test_where_every_folder_is_in_somebody_s_way_the_first_reason_is_told(tmp_path: Path) -> None:
    calls = FaultyCalls()
    calls.fault = lambda called: errno.EACCES if called == "lock" else None
    found = BlockFolder(tmp_path / "d", MODEL, host(), calls).look(LOOK)
    assert found.failure is DiskFailure.ERROR
    assert "Permission denied" in found.why


CHILD = """
import sys
from pathlib import Path
from tests.unit.engine.prefix_disk.test_vanished_folders import *

disk = BlockFolder(Path(sys.argv[1]) / "d", MODEL, host())
for line in sys.stdin:
    job, *numbers = line.split()
    result = disk.look(LOOK) if job == "look" else write(disk, *map(int, numbers))
    print(result.num_done, result.failure is None, flush=True)
"""


def test_processes_of_which_one_lost_its_folder_have_one_each(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def do(job: str) -> str:
        print(job, file=child.stdin, flush=True)
        return child.stdout.readline().strip()  # type: ignore[union-attr]

    with child:
        assert do("look") == "0 True"
        assert do("write 0") == "1 True"
        vanish(tmp_path)
        disk = opened(tmp_path, host())
        assert write(disk, 1) == DiskResult(1)
        assert do("write 2") == "0 False"
        assert names(tmp_path) == ["node-0"]
        assert do("look") == "0 True"
        assert do("write 2 3") == "2 True"
        assert names(tmp_path) == ["node-0", "node-1", "node-1"]
        child.stdin.close()
        assert child.wait(60) == 0
