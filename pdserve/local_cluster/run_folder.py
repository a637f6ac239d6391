"""The folder of one run: logs, kept after a failure, and private files, always removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from common.errors import ConfigError
from common.files.trusted_folder import why_untrusted
from common.settings.redis_url import MOST_SOCKET_PATH_BYTES
from pdserve.configuration.option_values import checked_text

_PREFIX = "pdserve-"
_SHORT_FOLDER = "/tmp"  # noqa: S108 (a folder that is private is made in it)
_LONGEST_SOCKET_NAME = "redis.sock"


class RunFolder:
    """A temporary folder, readable by its owner alone, and locked while its run lasts.

    On exit the private part (configurations with secrets, Redis's folder) is removed; the logs are
    removed with it unless `keep_logs` was called, or they lie in a `log_folder` of the user. Raises
    `ConfigError` where another user could put a folder of his own in its place.
    """

    def __init__(self, log_folder: Path | None = None) -> None:
        self.path = _private_folder(_PREFIX, _temporary_folder())
        self._locks = [_locked(self.path)]
        self.private = self.path / "private"
        self.private.mkdir(mode=0o700)
        self.sockets = _folder_of_sockets(self.private)
        """A private folder whose path is short enough for sockets; most often `private`."""
        if self.sockets != self.private:
            self._locks.append(_locked(self.sockets))
        self._log_folder = log_folder
        self._keeps_logs = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for folder in (self.sockets, self.private if self._keeps_logs else self.path):
            shutil.rmtree(folder, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)

    @property
    def logs(self) -> Path:
        """The folder of the logs."""
        return self._log_folder or self.path

    @property
    def keeps_logs(self) -> bool:
        """Whether the logs are there after the run."""
        return self._keeps_logs or self._log_folder is not None

    def log_path(self, name: str) -> Path:
        """Return the path of the log of the process called `name`."""
        return self.logs / f"{name}.log"

    def keep_logs(self) -> None:
        """Keep the logs after the run, for the diagnosis of a failure."""
        self._keeps_logs = self._log_folder is None


def _locked(folder: Path) -> int:
    """Return the locked descriptor of a folder: systemd-tmpfiles, which removes what is old from
    folders for temporary files, leaves out what is locked."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def make_log_folder(folder: Path) -> None:
    """Make a folder for logs, unless it is there.

    Raises `ConfigError` for one in which no file can be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--log-folder {folder} is a file: wanted a folder") from None
    except OSError as error:
        raise ConfigError(f"--log-folder {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-folder {folder}: wanted a folder in which files can be made")


def _folder_of_sockets(private: Path) -> Path:
    """Return `private`, or another private folder where a socket's path would be too long."""
    longest = private / _LONGEST_SOCKET_NAME
    if len(os.fsencode(longest.absolute())) <= MOST_SOCKET_PATH_BYTES:
        return private
    return _private_folder("pds-", _SHORT_FOLDER)


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(
            "no file can be written in the folders of temporary files, such as /tmp: wanted one "
            "with room (set TMPDIR)"
        ) from None


def _private_folder(prefix: str, parent: str) -> Path:
    try:
        checked_text(parent)  # settings name files in it
    except ValueError as wanted:
        raise ConfigError(f"TMPDIR is {parent!r}: {wanted}") from None
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise ConfigError(f"no folder can be made in {parent}: {error.strerror}") from None
    if problem := why_untrusted(folder):
        folder.rmdir()
        raise ConfigError(
            f"the folder of temporary files is {parent}, and {problem}: wanted one in which no "
            "other user can rename files (set TMPDIR)"
        )
    return folder


def earlier_runs() -> list[Path]:
    """Return the folders of this user's earlier runs that are over, oldest first.

    They hold logs that were kept; after a run that was killed, its secrets too.
    """
    found: list[tuple[float, Path]] = []
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if "-" in path.name.removeprefix(_PREFIX):
            continue  # a name that `mkdtemp` has not drawn here: another program's
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, no folder, or gone
        try:
            status = os.fstat(folder)
            is_ours = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
            if is_ours and _is_over(folder):
                found.append((status.st_mtime, path))
        finally:
            os.close(folder)
    return [path for _, path in sorted(found)]


def _is_over(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
