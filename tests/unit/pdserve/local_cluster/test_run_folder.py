"""The folder of a run of `pdserve up`, and those of earlier runs."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.settings.redis_url import MOST_SOCKET_PATH_BYTES
from pdserve.local_cluster.run_folder import RunFolder, earlier_runs

HOLD = """
import sys
from common.settings.redis_url import MOST_SOCKET_PATH_BYTES
from pdserve.local_cluster.run_folder import RunFolder
with RunFolder() as run:
    (run.private / "router.toml").write_text("secret")
    print(run.path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that this test alone has."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def test_the_folders_of_runs_that_are_over_are_found(temporary: Path) -> None:
    assert earlier_runs() == []
    with RunFolder() as first:
        first.keep_logs()
        assert earlier_runs() == [], "it runs"
    with RunFolder() as second:
        second.keep_logs()
        assert earlier_runs() == [first.path]
    os.utime(first.path, (1, 1))
    assert earlier_runs() == [first.path, second.path]
    with RunFolder():
        pass
    assert earlier_runs() == [first.path, second.path], "its logs were not kept"


def test_a_run_that_was_killed_is_over(temporary: Path) -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().decode().strip())
        assert earlier_runs() == []
        process.kill()
    assert earlier_runs() == [path]


def test_what_is_not_a_run_of_this_user_is_left_out(temporary: Path) -> None:
    (temporary / "pdserve-file").write_text("x")
    (temporary / "pdserve-link").symlink_to(temporary)
    (temporary / "pdserve-open").mkdir(mode=0o755)
    (temporary / "other").mkdir(mode=0o700)
    (temporary / "pdserve-redis-2uk14zng").mkdir(mode=0o700)
    stranger = temporary / "pdserve-stranger"
    stranger.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(stranger, 65534, 65534)
    else:
        stranger.rmdir()
    assert earlier_runs() == []


def test_sockets_have_a_short_folder_where_temporary_files_have_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder() as run:
        assert run.sockets == run.private
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with RunFolder() as run:
        sockets = run.sockets
        assert len(os.fsencode(sockets / "redis.sock")) < MOST_SOCKET_PATH_BYTES
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        assert run.private.is_relative_to(long)
        run.keep_logs()
    assert not sockets.exists()
    assert run.path.exists()


@pytest.mark.covers("M09")
def test_its_folders_are_locked_so_that_nobody_removes_what_is_old_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd-tmpfiles removes what was not used for ten days, sockets and keys too, except below
    a folder that is locked."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with RunFolder() as run:
        assert run.sockets.parent != run.private
        for folder in (run.path, run.sockets):
            opened = os.open(folder, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.close(opened)


@pytest.mark.parametrize("name", [b"a\xff", b"a\nb"])
def test_temporary_files_whose_path_is_no_text_are_refused(
    name: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings name files in that folder: Redis's socket, keys."""
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match=r"^TMPDIR is '.*a.*': wanted UTF-8 text without control"):
        RunFolder()
    assert list(folder.iterdir()) == []


def test_a_machine_on_which_nothing_can_be_written_is_told(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(ConfigError, match=r"no folder can be made in .*: Read-only"):
        RunFolder()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", _nowhere)
    with pytest.raises(ConfigError, match="TMPDIR"):
        RunFolder()


def _nowhere(*_: object) -> None:
    raise FileNotFoundError


@pytest.mark.parametrize("part", ["", "above"])
def test_temporary_files_that_others_can_rename_are_refused(temporary: Path, part: str) -> None:
    folder = temporary / "above" / "temporary"
    folder.mkdir(parents=True)
    tempfile.tempdir = str(folder)
    (temporary / part if part else folder).chmod(0o777)
    with pytest.raises(ConfigError, match=r"everybody may write .*: wanted .*TMPDIR"):
        RunFolder()
    assert list(folder.iterdir()) == []
    (temporary / part if part else folder).chmod(0o1777)
    with RunFolder() as run:
        assert run.path.parent == folder
