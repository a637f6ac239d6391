"""Files that are read again when they change."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.files.followed_files import FollowedFiles


def test_files_that_break_again_as_before_are_logged_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where they were put back in between as they were, so that nothing was read."""
    path, away = tmp_path / "keys", tmp_path / "away"
    path.write_text("a")

    def load() -> str:
        if not path.exists():
            raise ConfigError("keys is missing")
        return path.read_text()

    followed = FollowedFiles([path], logging.getLogger("test"), stays="the keys stay")
    for number in (1, 2):
        path.rename(away)
        assert followed.read_if_changed(load) is None
        assert followed.read_if_changed(load) is None
        assert caplog.messages == ["the keys stay: keys is missing"] * number
        away.rename(path)
        assert followed.read_if_changed(load) is None, "these were read"
    path.write_text("other")
    assert followed.read_if_changed(load) == "other"
    assert followed.read_if_changed(load) is None


def test_a_folder_that_a_link_leads_to_may_be_replaced(tmp_path: Path) -> None:
    """As the files of a secret in Kubernetes, which are links through a link `..data`."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "file").symlink_to("..data/file")
    files = FollowedFiles([tmp_path / "file"], logging.getLogger("test"), stays="it stays")
    assert files.read_if_changed((tmp_path / "file").read_text) is None
    (tmp_path / "..new").symlink_to("second")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert files.read_if_changed((tmp_path / "file").read_text) == "second"
    assert files.read_if_changed((tmp_path / "file").read_text) is None
