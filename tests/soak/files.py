"""Whether the files of prefixes are what indexes name, when all nodes have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from engine.core.blocks.disk_index import DiskIndex
from engine.core.blocks.disk_jobs import DiskLook
from engine.prefix_disk.block_file import HEADER_BYTES, CorruptFile, check_file
from engine.prefix_disk.block_folder import MOST_FOLDERS, BlockFolder

_LOCK, _BLOCK = ".lock", ".kv"


def folder_of(flags: Sequence[str]) -> Path | None:
    """Return the folder that `--prefix-disk` names; None: there is none."""
    found = [after for flag, after in pairwise(flags) if flag == "--prefix-disk"]
    return Path(found[-1]) if found else None


def file_complaints(path: Path, num_blocks: Mapping[str, int]) -> list[str]:
    """Complain of files that no index names, or that are not whole, right and of one layout.

    `num_blocks` is what each node said at last to have on disk; all have ended.
    """
    files = sorted(one for one in path.rglob("*") if one.is_file() and one.name != _LOCK)
    layouts = sorted({one.parent.name for one in files})
    complaints = [f"{one}: {wrong}" for one in files if (wrong := _what_is_wrong(one))]
    if len(layouts) != 1:
        return [*complaints, f"{path} has files of the layouts {layouts}: wanted those of one"]
    named = _named(path, layouts[0], files)
    complaints += [f"{one}: no index names it" for one in files if one not in named]
    if sum(num_blocks.values()) != len(files):
        complaints.append(f"nodes had {dict(num_blocks)} blocks on disk: there are {len(files)}")
    return complaints


def _what_is_wrong(file: Path) -> str:
    """Return why a file is not the whole block that its name says; empty: it is."""
    if file.suffix != _BLOCK:
        return "it is left of a write"
    content = file.read_bytes()
    try:
        block_hash = bytes.fromhex(file.stem)
        block = memoryview(content)[HEADER_BYTES:]
        check_file(content[:HEADER_BYTES], file.parent.name, block_hash, block)
    except (ValueError, CorruptFile) as error:
        return str(error)
    return ""


def _named(path: Path, fingerprint: str, files: Sequence[Path]) -> set[Path]:
    """Return the files that the indexes of new nodes name: each takes one of the folders."""
    block_bytes = files[0].stat().st_size - HEADER_BYTES
    host = np.zeros((1, 1, 1, block_bytes), np.uint8)
    folders = [BlockFolder(path, fingerprint, host) for _ in range(MOST_FOLDERS)]
    named: set[Path] = set()
    try:
        for number, folder in enumerate(folders):
            own = path / f"node-{number}"
            if not own.exists():
                break
            index = DiskIndex(1 << 62, HEADER_BYTES + block_bytes)
            scan = folder.look(DiskLook(is_all=True)).scan
            assert scan is not None, "a look at all sees all"
            index.take_own(scan)
            index.check()
            named |= {own / fingerprint / (one.hex() + _BLOCK) for one in scan.own}
    finally:
        for folder in folders:
            folder.close()
    return named
