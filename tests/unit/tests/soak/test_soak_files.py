"""What a soak complains of in the files that its nodes have left."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

from common.kv.blocks import hash_words_behind
from engine.core.blocks.disk_jobs import DiskLook, DiskWrite
from engine.prefix_disk.block_folder import BlockFolder
from tests.soak.files import file_complaints, folder_of

FINGERPRINT = "f" * 32
HASHES = hash_words_behind(b"", array("I", range(4)), 1)


def left(path: Path, fingerprint: str = FINGERPRINT) -> dict[str, int]:
    """Two nodes have ended; return how many blocks each has in files."""
    host = np.random.default_rng(3).integers(0, 256, (2, 2, 4, 100), np.uint8)
    nodes = [BlockFolder(path, fingerprint, host) for _ in range(2)]
    for node, places in zip(nodes, ([0, 1], [1, 2, 3]), strict=True):
        node.look(DiskLook(is_all=True))
        node.write(DiskWrite(places, [HASHES[place] for place in places], []))
    for node in nodes:
        node.close()
    return {"p": 2, "d": 3}


def a_file(path: Path) -> Path:
    return next(iter(sorted(path.glob("node-1/*/*.kv"))))


def test_what_whole_nodes_leave_is_nothing_to_complain_of(tmp_path: Path) -> None:
    counts = left(tmp_path / "d")
    assert file_complaints(tmp_path / "d", counts) == []
    assert file_complaints(tmp_path / "d", counts) == [], "to look changes nothing"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("half.new", "left of a write"), ("x.kv", "fromhex"), ("00" * 16 + ".kv", "header")],
)
def test_a_file_that_no_index_names_is_complained_of(
    name: str, complaint: str, tmp_path: Path
) -> None:
    counts = left(tmp_path / "d")
    a_file(tmp_path / "d").with_name(name).write_bytes(b"something")
    complaints = " ".join(file_complaints(tmp_path / "d", counts))
    assert complaint in complaints
    assert "no index names it" in complaints


def test_a_wrong_byte_is_complained_of(tmp_path: Path) -> None:
    counts = left(tmp_path / "d")
    file = a_file(tmp_path / "d")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert file_complaints(tmp_path / "d", counts) == [f"{file}: the checksum is wrong"]


def test_a_file_that_is_gone_or_of_another_layout_is_complained_of(tmp_path: Path) -> None:
    counts = left(tmp_path / "d")
    a_file(tmp_path / "d").unlink()
    [missing] = file_complaints(tmp_path / "d", counts)
    assert missing.endswith("there are 4")
    left(tmp_path / "d", "e" * 32)
    assert "wanted those of one" in file_complaints(tmp_path / "d", counts)[-1]


def test_the_folder_is_that_of_the_flags() -> None:
    assert folder_of(("--prefix-disk", "/d", "--prefix-disk-size", "4MiB")) == Path("/d")
    assert folder_of(("--block-size", "16")) is None
