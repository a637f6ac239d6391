"""What was read of a model's folder is kept for processes that start later."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from common.files.kept_files import KeptFiles


def test_a_file_that_was_read_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"earlier")
    files = KeptFiles()
    assert files.read(path) == b"earlier"
    path.write_bytes(b"another model's")
    assert files.read(path) == b"earlier"
    path.unlink()
    assert files.has(path)
    assert files.read(path) == b"earlier"


def test_a_helper_has_what_was_read_and_nothing_else(tmp_path: Path) -> None:
    read, unread = tmp_path / "read", tmp_path / "unread"
    read.write_bytes(b"1234")
    unread.write_bytes(b"later")
    files = KeptFiles()
    assert files.read(read, 3) == b"123", "as much as is wanted"
    of_helper = KeptFiles(files.kept)
    read.unlink()
    assert of_helper.read(read) == b"123"
    assert not of_helper.has(unread)
    assert of_helper.read(unread) is None


@pytest.mark.covers("M11")
def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xef\xbb\xbf{{ messages }}")
    files = KeptFiles()
    assert files.read(tmp_path / "chat_template.jinja") == b"{{ messages }}"
    assert KeptFiles(files.kept).read(tmp_path / "chat_template.jinja") == b"{{ messages }}"


def test_what_is_missing_or_cannot_be_read(tmp_path: Path) -> None:
    files = KeptFiles()
    assert files.read(tmp_path / "nowhere") is None
    assert not files.has(tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError):
        files.read(tmp_path)


def test_its_descriptors_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    files = KeptFiles()
    files.read(tmp_path / "file")
    (descriptor,) = files.kept.values()
    os.fstat(descriptor)
    del files
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
