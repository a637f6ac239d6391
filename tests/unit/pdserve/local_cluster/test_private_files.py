"""Logs are this user's own files, whatever lies in their folder before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from common.errors import ConfigError
from pdserve.local_cluster.private_files import open_private_log, write_private

NOBODY = 65534


def test_a_log_is_private_and_written_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    path.write_text("before\n")
    path.chmod(0o666)
    for _ in range(2):
        with open_private_log(path) as log:
            log.write(b"more\n")
    assert path.read_text() == "before\nmore\nmore\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    write_private(path, "secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match=r"router\.toml cannot be written: File exists"):
        write_private(path, "other")
    assert path.read_text() == "secret"


def test_what_another_user_can_put_there_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    path = tmp_path / "router.log"
    path.symlink_to(victim)
    with pytest.raises(ConfigError, match=r"router\.log cannot be written"):
        open_private_log(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        open_private_log(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match="is not a file of this user"):
        open_private_log(path)
    os.close(reader)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        open_private_log(path)
    path.rmdir()
    if os.geteuid() == 0:
        path.write_text("theirs")
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(ConfigError, match="is not a file of this user"):
            open_private_log(path)
        assert path.read_text() == "theirs"
    assert victim.read_text() == "keep"
