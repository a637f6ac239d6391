"""The cache: built once, whole or not at all, by one of many."""

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.errors import CheckpointError, ConfigError
from common.files.cache_folder import build_once, cache_root, full_path


def test_the_cache_folder_is_the_most_specific_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("PDSERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/pdserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert cache_root() == Path("/var/caches/pdserve")
    monkeypatch.setenv("PDSERVE_CACHE", "~/models")
    assert cache_root() == Path("/home/someone/models")


@pytest.mark.covers("M03")
def test_without_a_home_folder_the_cache_has_to_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(_: int) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "PDSERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"HOME is not set and user id .* PDSERVE_CACHE"):
        cache_root()
    monkeypatch.setenv("PDSERVE_CACHE", "/var/caches")
    assert cache_root() == Path("/var/caches")


@pytest.mark.parametrize("name", ["PDSERVE_CACHE", "XDG_CACHE_HOME"])
def test_a_home_folder_of_nobody_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CACHE", raising=False)
    monkeypatch.setenv(name, "~no-such-user/cache")
    with pytest.raises(ConfigError, match="~no-such-user/cache: there is no such user"):
        cache_root()


def test_a_current_folder_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(ConfigError, match="demo: the current folder was removed"):
        full_path("demo")
    assert full_path("/models/demo") == Path("/models/demo")


def test_builds_once(tmp_path: Path) -> None:
    builds = []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "file").write_text("whole")

    for _ in range(2):
        folder = build_once(tmp_path / "deep" / "thing", build)
        assert (folder / "file").read_text() == "whole"
    assert len(builds) == 1
    assert builds[0] != folder


def test_of_two_at_once_one_builds_and_the_other_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds, seen = [], []
    is_other_waiting, is_built = threading.Event(), threading.Event()

    def wait_for_the_lock(_seconds: float) -> None:
        is_other_waiting.set()
        is_built.wait(timeout=30)

    def build(folder: Path) -> None:
        builds.append(folder)
        assert is_other_waiting.wait(timeout=30)
        (folder / "file").write_text("whole")
        is_built.set()

    def use() -> None:
        seen.append((build_once(tmp_path / "thing", build) / "file").read_text())

    # The only sleep is the one between two tries to get the lock.
    monkeypatch.setattr("common.files.cache_folder.time.sleep", wait_for_the_lock)
    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert seen == ["whole", "whole"]
    assert len(builds) == 1


def test_a_lock_held_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.files.cache_folder._BUILD_WAIT_S", -1.0)
    with (tmp_path / ".thing.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"\.thing\.lock: another process has held it"):
            build_once(tmp_path / "thing", lambda folder: None)


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise CheckpointError("no such tensor")

    with pytest.raises(CheckpointError, match="no such tensor"):
        build_once(tmp_path / "thing", fail)
    assert [p.name for p in tmp_path.iterdir()] == [".thing.lock"]
    build_once(tmp_path / "thing", lambda folder: (folder / "file").touch())
    assert (tmp_path / "thing" / "file").exists()


@pytest.mark.covers("M04")
def test_a_loss_of_power_leaves_no_name_without_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = set()

    def note(opened: int) -> None:
        flushed.add(Path(f"/proc/self/fd/{opened}").readlink())

    def build(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("whole")
        (folder / "link").symlink_to("/nowhere")
        built.append(folder)

    built: list[Path] = []
    monkeypatch.setattr("common.files.cache_folder.os.fsync", note)
    build_once(tmp_path / "thing", build)
    (folder,) = built
    assert flushed == {folder, folder / "deep", folder / "deep" / "file"}


def test_a_killed_build_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from common.files.cache_folder import build_once\n"
        "def build(folder):\n"
        "    (folder / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_once(Path(sys.argv[1]), build)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "thing")], timeout=60, check=False
    )
    assert killed.returncode == -9
    assert len(list(tmp_path.glob(".thing.building-*"))) == 1
    build_once(tmp_path / "thing", lambda folder: (folder / "file").touch())
    assert sorted(p.name for p in tmp_path.iterdir()) == [".thing.lock", "thing"]
    assert [p.name for p in (tmp_path / "thing").iterdir()] == ["file"]


def test_an_impossible_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/thing cannot .* of .*file: .*PDSERVE_CACHE"):
        build_once(tmp_path / "file" / "thing", lambda folder: None)


def test_others_may_read_what_is_built(tmp_path: Path) -> None:
    folder = build_once(tmp_path / "thing", lambda folder: None)
    assert folder.stat().st_mode & 0o777 == 0o755
