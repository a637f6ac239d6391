"""The cache folder, and building something in it once, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import CheckpointError, ConfigError

_BUILD_WAIT_S = 900.0
_LOCK_POLL_S = 0.1


def cache_root() -> Path:
    """Return `$PDSERVE_CACHE`, else `$XDG_CACHE_HOME/pdserve`, else `~/.cache/pdserve`.

    Raises `ConfigError` where that folder is unknown, as for a user id without a home folder.
    """
    if own := os.environ.get("PDSERVE_CACHE"):
        return full_path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return full_path(shared) / "pdserve"
    return full_path("~/.cache") / "pdserve"


def full_path(text: str) -> Path:
    """Return what `text` names as an absolute path, with `~` and `~NAME` as home folders.

    Raises `ConfigError` for a home folder that is not known, and for a relative path in a current
    folder that was removed.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"{text}: HOME is not set and user id {os.getuid()} has no home folder: set HOME, or "
            "name a folder for the cache in PDSERVE_CACHE"
            if text.partition("/")[0] == "~"
            else f"{text}: there is no such user: wanted an absolute path"
        ) from None
    except FileNotFoundError:
        raise ConfigError(
            f"{text}: the current folder was removed: wanted an absolute path, or another current "
            "folder"
        ) from None


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, made by `build(empty temporary folder)` if it does not exist yet.

    The temporary folder is renamed when `build` returns, so `folder` is always complete. Of several
    processes one builds and the others wait; the next builder removes what a killed one left.
    Raises `CheckpointError` when the file system refuses or another process builds for too long.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                _build_and_rename(folder, build)
    except OSError as error:
        raise _not_written(folder, error) from error
    return folder


def rebuild(folder: Path, build: Callable[[Path], None], is_good: Callable[[], bool]) -> None:
    """Build `folder` again, as `build_once` does, unless another process already has (`is_good`).

    Processes that use the old files keep them. Raises `CheckpointError` as `build_once` does.
    """
    try:
        with locked(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir() and is_good():
                return
            shutil.rmtree(folder, ignore_errors=True)
            _build_and_rename(folder, build)
    except OSError as error:
        raise _not_written(folder, error) from error


def _not_written(folder: Path, error: OSError) -> CheckpointError:
    where = f" of {error.filename}" if error.filename else ""
    return CheckpointError(
        f"{folder} cannot be written: {error.strerror or error}{where}: wanted a folder with room "
        "(PDSERVE_CACHE names another one)"
    )


def _build_and_rename(folder: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}.building-"
    for left_behind in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_behind)
    building = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        build(building)
        _flush(building)
        building.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from other users
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Write to the disk what is in a folder: a loss of power would leave names without bytes."""
    for path in (*folder.rglob("*"), folder):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            continue
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextmanager
def locked(lock_path: Path, wait_s: float | None = None) -> Iterator[None]:
    """Hold the lock file; the kernel releases it if this process dies.

    Raises `CheckpointError` when another process holds it for longer than `wait_s` (None: as long
    as something may take to build).
    """
    wait_s = _BUILD_WAIT_S if wait_s is None else wait_s
    give_up_at_s = time.monotonic() + wait_s
    with lock_path.open("a") as lock_file:  # NFS locks only what is open for writing
        while True:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at_s:
                    raise CheckpointError(
                        f"{lock_path}: another process has held it for {wait_s:.0f} s: "
                        "stop that process, or name another folder in PDSERVE_CACHE"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield


@contextmanager
def try_locked(lock_path: Path) -> Iterator[bool]:
    """Hold the lock file, unless another process does; yield whether this one holds it.

    Raises `OSError` when the file cannot be opened or locked.
    """
    with lock_path.open("a") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = False
        else:
            is_held = True
        yield is_held
