"""Blocks with numbers for hashes, written to a node's files and read again."""

from __future__ import annotations

from array import array
from pathlib import Path

from common.kv.blocks import BlockHash, hash_words_behind
from engine.core.blocks.disk_jobs import OWN_FOLDER, DiskRead, DiskResult, DiskWrite
from engine.prefix_disk.block_folder import BlockFolder


def hash_of(number: int) -> BlockHash:
    return hash_words_behind(b"", array("I", [number]), 1)[0]


def write(into: BlockFolder, *numbers: int) -> DiskResult:
    """Write the blocks of host memory that have these numbers."""
    return into.write(DiskWrite(list(numbers), [hash_of(n) for n in numbers], []))


def read(out_of: BlockFolder, number: int, at: int, where: str = OWN_FOLDER) -> DiskResult:
    """Read one block to the place `at` of host memory."""
    return out_of.read(DiskRead([at], [hash_of(number)], [where]))


def files(path: Path) -> list[Path]:
    """The files of all folders below `path / "d"`."""
    return [one for one in (path / "d").glob("*/*/*") if one.is_file()]
