"""A file's stamp differs after each kind of change."""

from __future__ import annotations

import os
from pathlib import Path

from common.files.file_stamp import file_stamp


def test_a_stamp_differs_after_a_change_of_time_size_or_file(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    assert file_stamp(path) is None
    path.write_text("one")
    os.utime(path, ns=(0, 1))
    first = file_stamp(path)
    assert file_stamp(path) == first
    os.utime(path, ns=(0, 2))
    later = file_stamp(path)
    path.write_text("longer")
    os.utime(path, ns=(0, 2))
    longer = file_stamp(path)
    other.write_text("longer")
    os.utime(other, ns=(0, 2))
    other.replace(path)
    replaced = file_stamp(path)
    assert len({first, later, longer, replaced}) == 4


def test_a_file_that_cannot_be_looked_at_has_no_stamp(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert file_stamp(tmp_path / "file" / "below") is None
