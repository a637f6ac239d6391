"""The calls of the system that files of blocks need. Each one may raise `OSError`."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

from common.files.trusted_folder import is_trusted


class FileSeen(NamedTuple):
    """A file in a folder: its name, its bytes, and when it was written or used last (ns)."""

    name: str
    num_bytes: int
    used_at_ns: int


class FileCalls:
    """The calls themselves. Files are readable and writable for their owner alone, folders too."""

    def make_folder(self, path: Path) -> None:
        """Make a folder unless there is one."""
        path.mkdir(0o700, exist_ok=True)

    def is_folder(self, path: Path) -> bool:
        """Return whether there is a folder, and no link to one."""
        try:
            return stat.S_ISDIR(path.lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def is_at(self, path: Path, fd: int) -> bool:
        """Return whether a path still names the file of a descriptor."""
        try:
            return os.path.samestat(path.lstat(), os.fstat(fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def lock(self, path: Path) -> int | None:
        """Hold a lock file until `close`; return its descriptor, or None if another process does.

        The kernel releases it when this process ends.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return fd

    def folders(self, path: Path) -> list[str]:
        """Return the names of the folders in a folder."""
        with os.scandir(path) as entries:
            return [one.name for one in entries if one.is_dir(follow_symlinks=False)]

    def files(self, path: Path) -> list[FileSeen]:
        """Return the files in a folder; not those that vanish meanwhile."""
        found = []
        with os.scandir(path) as entries:
            for one in entries:
                try:
                    if one.is_file(follow_symlinks=False):
                        status = one.stat(follow_symlinks=False)
                        found.append(FileSeen(one.name, status.st_size, status.st_mtime_ns))
                except FileNotFoundError:
                    continue
        return found

    def names(self, path: Path) -> list[str]:
        """Return the names of what is in a folder."""
        with os.scandir(path) as entries:
            return [one.name for one in entries]

    def open_new(self, path: Path) -> int:
        """Open a file to write it from its beginning."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600)

    def write(self, fd: int, data: memoryview) -> int:
        """Write some of these bytes; return how many."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Return when what was written survives a power cut."""
        os.fsync(fd)

    def rename(self, path: Path, to: Path) -> None:
        """Give a file another name, in place of the file that had it."""
        path.rename(to)

    def open_old(self, path: Path) -> int:
        """Open a file to read it."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def is_own(self, fd: int) -> bool:
        """Return whether nobody but this user, and root, can have written a file."""
        return is_trusted(os.fstat(fd))

    def read(self, fd: int, into: memoryview) -> int:
        """Read some bytes; return how many, 0 at the end."""
        return os.readv(fd, [into])

    def note_use(self, fd: int) -> None:
        """Set when a file was used last to now."""
        os.utime(fd)

    def now_ns(self) -> int:
        """Return the time, as files have it."""
        return time.time_ns()

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()
