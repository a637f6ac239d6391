"""Files that are read again when they change, and what is said of broken ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.files.followed_files import FollowedFiles

log = logging.getLogger("pdserve")


def test_files_that_break_again_after_they_were_in_order_are_told_of_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a volume that is away and comes back: the files are the same ones then."""
    path, aside = tmp_path / "file", tmp_path / "aside"
    path.write_text("a")
    files = FollowedFiles([path], log, stays="it stays")

    def load() -> str:
        if not path.exists():
            raise ConfigError("file is missing")
        return path.read_text()

    for _ in range(2):
        path.rename(aside)
        assert [files.read_if_changed(load) for _ in range(3)] == [None] * 3
        aside.rename(path)
        assert files.read_if_changed(load) is None
    assert caplog.messages == ["it stays: file is missing"] * 2
    path.write_text("bc")
    assert files.read_if_changed(load) == "bc"


def test_a_folder_that_a_link_leads_to_may_be_replaced(tmp_path: Path) -> None:
    """As the files of a secret in Kubernetes, which are links through a link `..data`."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "file").symlink_to("..data/file")
    files = FollowedFiles([tmp_path / "file"], log, stays="it stays")
    assert files.read_if_changed((tmp_path / "file").read_text) is None
    (tmp_path / "..new").symlink_to("second")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert files.read_if_changed((tmp_path / "file").read_text) == "second"
    assert files.read_if_changed((tmp_path / "file").read_text) is None
