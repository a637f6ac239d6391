"""Files of blocks: complete or absent whatever happens, right or not used, this user's alone."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine.core.blocks.disk_jobs import (
    OWN_FOLDER,
    DiskFailure,
    DiskLook,
    DiskRead,
    DiskResult,
    DiskScan,
    DiskWrite,
)
from engine.prefix_disk import block_folder
from engine.prefix_disk.block_file import HEADER_BYTES, CorruptFile, check_file, file_header
from engine.prefix_disk.block_folder import BlockFolder
from pdserve.local_cluster.child_process import ending_with_parent
from tests.support.disk.faulty_files import WRITING, FaultyCalls, sometimes
from tests.support.disk.written_blocks import files, hash_of, read, write

NUM_HOST_BLOCKS = 8
LOOK = DiskLook(is_all=True)


def host(seed: int = 0, piece_bytes: int = 1000) -> np.ndarray:
    shape = (3, 2, NUM_HOST_BLOCKS, piece_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def folder(path: Path, memory: np.ndarray, fingerprint: str = "f" * 16) -> BlockFolder:
    return BlockFolder(path / "d", fingerprint, memory, FaultyCalls())


def opened(path: Path, memory: np.ndarray, fingerprint: str = "f" * 16) -> BlockFolder:
    made = folder(path, memory, fingerprint)
    assert made.look(LOOK).failure is None
    return made


def test_a_block_returns_as_it_was_and_nothing_beside_it_changes(tmp_path: Path) -> None:
    memory = host()
    before = memory.copy()
    disk = opened(tmp_path, memory)
    assert write(disk, 0, 1, 2) == DiskResult(3)
    memory[:, :, 4:7] = 0
    result = disk.read(DiskRead([6, 5, 4], [hash_of(n) for n in (0, 1, 2)], [OWN_FOLDER] * 3))
    assert result == DiskResult(3)
    assert np.array_equal(memory[:, :, [6, 5, 4]], before[:, :, :3])
    assert np.array_equal(memory[:, :, [0, 1, 2, 3, 7]], before[:, :, [0, 1, 2, 3, 7]])


def test_files_are_their_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(opened(tmp_path, host()), 0)
    finally:
        os.umask(before)
    found = [tmp_path / "d", *(tmp_path / "d").rglob("*")]
    assert len(found) == 5
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("mode", [0o777, 0o722])
def test_a_folder_that_others_may_write_is_not_used(mode: int, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(mode)
    found = folder(tmp_path, host()).look(LOOK)
    assert found.failure is DiskFailure.ERROR
    assert "wanted a folder that only this user may write" in found.why
    assert not list((tmp_path / "d").iterdir())


@pytest.mark.parametrize("is_all", [True, False])
@pytest.mark.parametrize("mode", [0o777, 0o722])
def test_nothing_is_seen_in_a_folder_that_others_may_write(
    mode: int, is_all: bool, tmp_path: Path
) -> None:
    write(opened(tmp_path, host()), 0)
    reader = folder(tmp_path, host())
    assert reader.look(DiskLook(is_all)).scan.others == {hash_of(0): "node-0"}
    (tmp_path / "d").chmod(mode)
    assert reader.look(DiskLook(is_all)).scan.others == {}


@pytest.mark.parametrize("mode", [0o602, 0o666])
def test_a_file_that_others_may_have_written_is_not_read(mode: int, tmp_path: Path) -> None:
    disk = opened(tmp_path, host())
    write(disk, 0)
    [path] = files(tmp_path)
    path.chmod(mode)
    found = read(disk, 0, 1)
    assert (found.num_done, found.failure) == (0, DiskFailure.CORRUPT)
    assert "another user may have written it" in found.why
    assert not path.exists(), "it would be read again"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    disk = opened(tmp_path, host())
    write(disk, 0)
    [path] = files(tmp_path)
    os.chown(path, 12345, -1)
    assert read(disk, 0, 1).failure is DiskFailure.CORRUPT


def test_the_header_says_whose_block_it_is() -> None:
    block = memoryview(b"x" * 100)
    header = file_header("abc", hash_of(1), block)
    assert len(header) == HEADER_BYTES
    assert header.startswith(b"pdservKV\x01\0\0\0")
    check_file(header, "abc", hash_of(1), block)
    for wrong in (("abd", hash_of(1), block), ("abc", hash_of(2), block)):
        with pytest.raises(CorruptFile):
            check_file(header, *wrong)


@pytest.mark.covers("F124")
def test_every_wrong_bit_is_noticed(tmp_path: Path) -> None:
    memory = host(piece_bytes=20)
    disk = opened(tmp_path, memory)
    write(disk, 0)
    [path] = files(tmp_path)
    content = path.read_bytes()
    for place in range(len(content)):
        wrong = bytearray(content)
        wrong[place] ^= 1 << place % 8
        path.write_bytes(wrong)
        assert read(disk, 0, 1).failure is DiskFailure.CORRUPT, place
        assert not path.exists(), "it would be read again"
    path.write_bytes(content)
    assert read(disk, 0, 1).failure is None


def test_host_memory_never_gets_bytes_that_were_not_verified(tmp_path: Path) -> None:
    memory = host()
    disk = opened(tmp_path, memory)
    write(disk, 0)
    [path] = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    before = memory.copy()
    assert read(disk, 0, 1).failure is DiskFailure.CORRUPT
    assert np.array_equal(memory, before)


@pytest.mark.covers("F126")
def test_what_fails_ends_a_read_and_what_came_before_counts(tmp_path: Path) -> None:
    memory = host()
    disk = opened(tmp_path, memory)
    write(disk, 0, 2)
    result = disk.read(DiskRead([5, 6, 7], [hash_of(n) for n in (0, 1, 2)], [OWN_FOLDER] * 3))
    assert (result.num_done, result.failure) == (1, DiskFailure.VANISHED)


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    memory = host()
    calls = FaultyCalls()
    calls.is_short = True
    disk = BlockFolder(tmp_path / "d", "f", memory, calls)
    disk.look(LOOK)
    assert write(disk, 0) == DiskResult(1)
    assert read(disk, 0, 1) == DiskResult(1)
    assert np.array_equal(memory[:, :, 0], memory[:, :, 1])


@pytest.mark.covers("F125")
@pytest.mark.parametrize("name", [n for n in WRITING if n not in ("lock", "make_folder", "remove")])
def test_a_write_that_fails_leaves_no_file(name: str, tmp_path: Path) -> None:
    calls = FaultyCalls()
    disk = BlockFolder(tmp_path / "d", "f", host(), calls)
    disk.look(LOOK)
    calls.fault = lambda called: errno.ENOSPC if called == name else None
    result = write(disk, 0)
    assert (result.num_done, result.failure) == (0, DiskFailure.ERROR)
    assert files(tmp_path) == []
    calls.fault = lambda called: None
    assert write(disk, 0) == DiskResult(1)


def test_a_scan_finds_what_was_used_longest_ago_first(tmp_path: Path) -> None:
    disk = opened(tmp_path, host())
    write(disk, 0, 1, 2, 3)
    for place, number in enumerate((2, 0, 3, 1)):
        [path] = [one for one in files(tmp_path) if one.stem == hash_of(number).hex()]
        os.utime(path, ns=(place, place))
    assert disk.look(LOOK).scan.own == tuple(hash_of(n) for n in (2, 0, 3, 1))
    read(disk, 2, 5)
    assert disk.look(LOOK).scan.own == tuple(hash_of(n) for n in (0, 3, 1, 2))


def test_a_scan_removes_what_is_no_whole_file_and_nothing_that_is_not_its_own(
    tmp_path: Path,
) -> None:
    disk = opened(tmp_path, host())
    write(disk, 0, 1)
    home = files(tmp_path)[0].parent
    name = hash_of(7).hex()
    (home / f"{name}.new").write_bytes(b"half")
    (home / f"{name}.kv").write_bytes(b"of another size")
    (home / "notes.txt").write_text("somebody's")
    stranger = home.with_name("another")
    stranger.mkdir()
    (stranger / f"{name}.kv").write_bytes(bytes(4097))
    (stranger / f"{name}.new").write_bytes(b"half")
    disk.close()
    found = opened(tmp_path, host()).look(LOOK).scan
    assert set(found.own) == {hash_of(0), hash_of(1)}
    assert found.strangers == ((f"another/{name}.kv", 4097),)
    assert {one.name for one in files(tmp_path)} == {
        f"{name}.kv", "notes.txt", f"{hash_of(0).hex()}.kv", f"{hash_of(1).hex()}.kv"
    }  # fmt: skip


def test_what_another_model_left_is_removed_by_its_name(tmp_path: Path) -> None:
    before = opened(tmp_path, host(), "old")
    write(before, 0)
    before.close()
    disk = opened(tmp_path, host(), "new")
    [(name, _)] = disk.look(LOOK).scan.strangers
    assert disk.write(DiskWrite([1], [hash_of(1)], [name])) == DiskResult(1)
    assert [one.parent.name for one in files(tmp_path)] == ["new"]


def test_two_nodes_have_a_folder_each_and_read_both(tmp_path: Path) -> None:
    memory = host()
    first, second = opened(tmp_path, host()), opened(tmp_path, memory)
    write(first, 0)
    write(second, 1)
    assert {one.parent.parent.name for one in files(tmp_path)} == {"node-0", "node-1"}
    assert first.look(DiskLook(is_all=False)).scan == DiskScan(others={hash_of(1): "node-1"})
    assert second.look(LOOK).scan == DiskScan(own=(hash_of(1),), others={hash_of(0): "node-0"})
    assert read(second, 0, 5, "node-0") == DiskResult(1)
    assert np.array_equal(memory[:, :, 5], host()[:, :, 0])
    first.close()
    assert opened(tmp_path, host()).look(LOOK).scan.own == (hash_of(0),)


def gone(path: Path, memory: np.ndarray, *numbers: int, days: float = 8.0) -> Path:
    """A node wrote these blocks and was seen last so many days ago; return its folder."""
    old = opened(path, memory)
    write(old, *numbers)
    own = path / "d" / f"node-{len(list((path / 'd').iterdir())) - 1}"
    old.close()
    at_s = time.time() - days * 24 * 3600
    os.utime(own / ".lock", (at_s, at_s))
    return own


def blocks_in(own: Path) -> int:
    return len(list(own.glob("*/*.kv")))


def test_what_a_node_left_that_is_gone_for_good_is_removed_by_another_one(tmp_path: Path) -> None:
    memory = host()
    living = opened(tmp_path, memory)
    write(living, 5)
    left = gone(tmp_path, memory, 0, 1, 2)
    (left / "mine").mkdir()
    (left / "mine" / "notes.txt").write_text("not a block")
    half = left / ("f" * 16) / (hash_of(7).hex() + ".new")
    half.write_bytes(b"half")
    scan = living.look(DiskLook(is_all=False)).scan
    assert scan is not None
    assert scan.others == {}, "what was removed is not seen"
    assert blocks_in(left) == 0
    assert not half.exists()
    assert (left / "mine" / "notes.txt").exists(), "what is not a block is nobody's to remove"
    assert len(files(tmp_path)) == 2
    write(opened(tmp_path, memory), 4)
    assert blocks_in(left) == 1, "the next node takes the folder"


@pytest.mark.parametrize("days", [0.0, 6.9])
def test_what_a_node_left_that_may_return_stays(days: float, tmp_path: Path) -> None:
    memory = host()
    living = opened(tmp_path, memory)
    left = gone(tmp_path, memory, 0, 1, days=days)
    living.look(LOOK)
    assert blocks_in(left) == 2


def test_a_node_that_lives_is_not_robbed_however_old_its_folder_is(tmp_path: Path) -> None:
    memory = host()
    first, second = opened(tmp_path, memory), opened(tmp_path, memory)
    write(second, 0)
    lock = tmp_path / "d" / "node-1" / ".lock"
    os.utime(lock, (0, 0))
    first.look(DiskLook(is_all=False))
    assert blocks_in(lock.parent) == 1, "it is locked"
    second.look(DiskLook(is_all=False))
    second.close()
    first.look(DiskLook(is_all=False))
    assert blocks_in(lock.parent) == 1, "it was there a moment ago"


def test_many_files_are_removed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_folder, "MOST_EMPTIED", 2)
    memory = host()
    living = opened(tmp_path, memory)
    left = gone(tmp_path, memory, 0, 1, 2, 3, 4)
    counts = []
    for _ in range(4):
        living.look(DiskLook(is_all=False))
        counts.append(blocks_in(left))
    assert counts == [3, 1, 0, 0]


@pytest.mark.parametrize("name", ["lock", "files", "names", "folders", "remove", "close"])
def test_a_folder_that_cannot_be_emptied_costs_nothing_else(name: str, tmp_path: Path) -> None:
    memory, calls = host(), FaultyCalls()
    living = BlockFolder(tmp_path / "d", "f" * 16, memory, calls)
    assert living.look(LOOK).failure is None
    write(living, 5)
    gone(tmp_path, memory, 0)
    calls.fault = lambda called: errno.EIO if called == name else None
    assert living.look(DiskLook(is_all=False)).failure is None
    calls.fault = lambda called: None
    assert read(living, 5, 6) == DiskResult(1)


@pytest.mark.covers("F136")
def test_nodes_of_another_layout_are_not_seen(tmp_path: Path) -> None:
    write(opened(tmp_path, host(), "a"), 0)
    assert opened(tmp_path, host(), "b").look(LOOK).scan == DiskScan()


def test_a_read_only_disk_is_read(tmp_path: Path) -> None:
    write(opened(tmp_path, host()), 0)
    memory = np.zeros_like(host())
    calls = FaultyCalls()
    disk = BlockFolder(tmp_path / "d", "f" * 16, memory, calls)
    calls.fault = lambda called: errno.EROFS if called in WRITING[:-1] else None
    found = disk.look(LOOK)
    assert found.failure is DiskFailure.ERROR
    assert found.scan.others == {hash_of(0): "node-0"}
    assert read(disk, 0, 3, "node-0") == DiskResult(1)
    assert np.array_equal(memory[:, :, 3], host()[:, :, 0])
    assert write(disk, 1).failure is DiskFailure.ERROR


@pytest.mark.covers("F125")
@pytest.mark.parametrize("seed", range(30))
def test_a_power_cut_loses_files_and_breaks_none(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    calls = FaultyCalls()
    memory = host(seed)
    disk = BlockFolder(tmp_path / "d", "f", memory, calls)
    disk.look(LOOK)
    calls.fault = sometimes(choose, 0.1, among=("write", "sync", "close", "rename", "remove"))
    for _ in range(3):
        write(disk, *choose.sample(range(NUM_HOST_BLOCKS), 4))
    calls.cut_power(choose)
    calls.fault = lambda called: None
    disk.close()
    check_all(tmp_path, memory)


def check_all(path: Path, memory: np.ndarray, fingerprint: str = "f") -> int:
    """Check that every file is whole and right, as it is and after a scan; return their number."""
    blocks = {hash_of(n): np.ascontiguousarray(memory[:, :, n]) for n in range(NUM_HOST_BLOCKS)}
    found = list((path / "d").glob("*/*/*.kv"))
    for one in found:
        block_hash = bytes.fromhex(one.stem)
        content = one.read_bytes()
        data = memoryview(content[HEADER_BYTES:])
        check_file(content[:HEADER_BYTES], fingerprint, block_hash, data)
        assert data == blocks[block_hash].reshape(-1).data
    again = BlockFolder(path / "d", fingerprint, memory)
    assert len(again.look(LOOK).scan.own) == len(found)
    again.close()
    assert [one for one in files(path) if one.suffix != ".kv"] == []
    return len(found)


CHILD = """
import sys
from pathlib import Path
from engine.prefix_disk.file_calls import FileCalls
from tests.unit.engine.prefix_disk.test_block_folder import *

class InPieces(FileCalls):
    def write(self, fd, data):
        num_written = super().write(fd, data[:65536])
        print("piece", flush=True)
        return num_written

disk = BlockFolder(Path(sys.argv[1]) / "d", "f", host(3, 200_000), InPieces())
assert disk.look(LOOK).failure is None
print("ready", flush=True)
number = 0
while True:
    number = (number + 1) % NUM_HOST_BLOCKS
    removed = [hash_of((number + 3) % NUM_HOST_BLOCKS)]
    assert disk.write(DiskWrite([number], [hash_of(number)], removed)).num_done == 1
"""


@pytest.mark.covers("F125")
def test_a_process_that_is_killed_in_mid_write_leaves_whole_files(tmp_path: Path) -> None:
    choose = random.Random(7)
    num_halves = num_whole = 0
    for _ in range(8):
        command = ending_with_parent([sys.executable, "-c", CHILD, str(tmp_path)])
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        for _ in range(choose.randint(0, 150)):
            child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        num_halves += any(one.suffix == ".new" for one in files(tmp_path))
        num_whole += check_all(tmp_path, host(3, 200_000))
    assert num_whole > 0
    assert num_halves > 0, "none was killed in mid-write"
