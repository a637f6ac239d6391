"""Encrypted files of blocks: nothing of a block is in one, and only its key reads it, as itself."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from engine.core.blocks.disk_jobs import (
    OWN_FOLDER,
    DiskFailure,
    DiskLook,
    DiskRead,
    DiskResult,
)
from engine.prefix_disk.block_file import HEADER_BYTES, file_header
from engine.prefix_disk.block_folder import BlockFolder
from engine.prefix_disk.block_seal import SEAL_BYTES, BlockSeal
from tests.support.disk.written_blocks import files, hash_of, read, write

SECRET, OTHER = b"a" * 40, b"b" * 40
BLOCK_BYTES = 3 * 2 * 100


def host() -> np.ndarray:
    """Memory of eight blocks, each of which repeats one byte, which a file must not show."""
    memory = np.empty((3, 2, 8, 100), np.uint8)
    memory[...] = np.arange(8, dtype=np.uint8)[:, None] + 65
    return memory


def opened(path: Path, memory: np.ndarray, secret: bytes | None = SECRET) -> BlockFolder:
    path.mkdir(exist_ok=True)
    seal = None if secret is None else BlockSeal(secret)
    made = BlockFolder(path / "d", "f" * 16, memory, seal=seal)
    assert made.look(DiskLook(is_all=True)).failure is None
    return made


def test_a_block_returns_as_it_was_and_none_of_it_is_in_the_file(tmp_path: Path) -> None:
    memory = host()
    disk = opened(tmp_path, memory)
    assert write(disk, 0, 1) == DiskResult(2)
    for path in files(tmp_path):
        content = path.read_bytes()
        assert len(content) == HEADER_BYTES + BLOCK_BYTES + SEAL_BYTES == disk.file_bytes
        assert b"AAA" not in content
        assert b"BBB" not in content
    assert disk.read(DiskRead([6, 7], [hash_of(0), hash_of(1)], [OWN_FOLDER] * 2)) == DiskResult(2)
    assert np.array_equal(memory[:, :, 6:], memory[:, :, :2])


def test_a_block_that_is_written_again_is_another_file(tmp_path: Path) -> None:
    """Equal nonces would show where two blocks differ."""
    disk = opened(tmp_path, host())
    write(disk, 0)
    [path] = files(tmp_path)
    before = path.read_bytes()
    write(disk, 0)
    after = path.read_bytes()
    assert before[HEADER_BYTES : HEADER_BYTES + 12] != after[HEADER_BYTES : HEADER_BYTES + 12]
    assert before[HEADER_BYTES + 12 :] != after[HEADER_BYTES + 12 :]


def test_the_next_process_with_the_key_finds_them_and_no_other_one(tmp_path: Path) -> None:
    memory = host()
    for secret in (SECRET, OTHER, None):
        disk = opened(tmp_path, memory, secret)
        assert disk.look(DiskLook(is_all=True)).scan.own == ()
        write(disk, 0)
        disk.close()
    assert len(files(tmp_path)) == 3
    for secret in (SECRET, OTHER, None):
        disk = opened(tmp_path, memory, secret)
        scan = disk.look(DiskLook(is_all=True)).scan
        assert scan.own == (hash_of(0),)
        assert len(scan.strangers) == 2, "they count against the bound"
        assert read(disk, 0, 5) == DiskResult(1)
        disk.close()
    assert np.array_equal(memory[:, :, 5], memory[:, :, 0])


def test_another_node_with_the_key_reads_them_and_one_without_sees_none(tmp_path: Path) -> None:
    memory, far = host(), np.zeros((3, 2, 8, 100), np.uint8)
    writer = opened(tmp_path, memory)
    write(writer, 3)
    other, stranger = opened(tmp_path, far), opened(tmp_path, far, OTHER)
    look = DiskLook(is_all=False)
    assert other.look(look).scan.others == {hash_of(3): "node-0"}
    assert read(other, 3, 0, "node-0") == DiskResult(1)
    assert np.array_equal(far[:, :, 0], memory[:, :, 3])
    assert stranger.look(look).scan.others == {}
    assert read(stranger, 3, 1, "node-0").failure is DiskFailure.VANISHED
    assert read(writer, 3, 4) == DiskResult(1), "nobody has removed it"


def forge(path: Path, number: int, content: bytes) -> None:
    """Write a file whose header and sum are right, as anybody can who knows the format."""
    path.write_bytes(file_header("f" * 16, hash_of(number), memoryview(content)) + content)


@pytest.mark.parametrize("wrong", ["plain", "another key", "another block", "one bit"])
def test_what_somebody_forges_is_not_read(wrong: str, tmp_path: Path) -> None:
    """Without a key anybody who can write there chooses what a model has read."""
    memory = host()
    disk = opened(tmp_path / "here", memory)
    write(disk, 0, 1)
    paths = {path.stem: path for path in files(tmp_path / "here")}
    mine, others = paths[hash_of(0).hex()], paths[hash_of(1).hex()]
    content = others.read_bytes()[HEADER_BYTES:]
    if wrong == "plain":
        content = b"!" * len(content)
    if wrong == "another key":
        write(opened(tmp_path / "there", host(), OTHER), 0)
        [path] = files(tmp_path / "there")
        content = path.read_bytes()[HEADER_BYTES:]
    if wrong == "one bit":
        changed = bytearray(mine.read_bytes()[HEADER_BYTES:])
        changed[-1] ^= 1
        content = bytes(changed)
    forge(mine, 0, content)
    before = memory.copy()
    result = read(disk, 0, 5)
    assert (result.num_done, result.failure) == (0, DiskFailure.CORRUPT)
    assert "not encrypted with this key, or was changed" in result.why
    assert np.array_equal(memory, before)
    assert not mine.exists()


def test_a_copied_file_is_that_of_the_block_it_was_written_for(tmp_path: Path) -> None:
    disk = opened(tmp_path, host())
    write(disk, 0, 1)
    paths = {path.stem: path for path in files(tmp_path)}
    shutil.copy(paths[hash_of(1).hex()], paths[hash_of(0).hex()])
    assert read(disk, 0, 5).failure is DiskFailure.CORRUPT
    assert read(disk, 1, 5) == DiskResult(1)


def test_the_name_of_a_key_does_not_give_it_away() -> None:
    names = [BlockSeal(secret).name for secret in (SECRET, OTHER, SECRET)]
    assert names[0] == names[2] != names[1]
    assert len(names[0]) == 16


def test_without_the_package_the_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(
        ConfigError, match=r"wanted the package cryptography, as in pdserve\[keys\]"
    ):
        BlockSeal(SECRET)
