"""Calls of a file system that fails, lies, is short, or loses what was not synced."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

from engine.prefix_disk.file_calls import FileCalls, FileSeen

WRITING = (
    "make_folder",
    "is_folder",
    "is_at",
    "lock",
    "open_new",
    "write",
    "sync",
    "rename",
    "remove",
    "close",
)
READING = ("open_old", "is_own", "read", "files", "folders", "names", "note_use", "close")


class FaultyCalls(FileCalls):
    """Real files; before each call `fault(name)` may return the number of an error to be raised.

    Nothing is synced for real: `cut_power` loses what was not.
    """

    def __init__(self) -> None:
        self.fault: Callable[[str], int | None] = lambda name: None
        self.is_short = False
        """Reads and writes move a part of what they could."""
        self.flip: Callable[[], bool] = lambda: False
        """Whether a read has one wrong bit."""
        self.ahead_ns = 0
        """How much later than it is the clock says it is."""
        self.num_calls = 0
        self._paths: dict[int, Path] = {}
        self._unsynced: set[Path] = set()

    def _before(self, name: str) -> None:
        self.num_calls += 1
        number = self.fault(name)
        if number is not None:
            raise OSError(number, os.strerror(number))

    def make_folder(self, path: Path) -> None:
        self._before("make_folder")
        super().make_folder(path)

    def is_folder(self, path: Path) -> bool:
        self._before("is_folder")
        return super().is_folder(path)

    def is_at(self, path: Path, fd: int) -> bool:
        self._before("is_at")
        return super().is_at(path, fd)

    def lock(self, path: Path) -> int | None:
        self._before("lock")
        return super().lock(path)

    def folders(self, path: Path) -> list[str]:
        self._before("folders")
        return super().folders(path)

    def files(self, path: Path) -> list[FileSeen]:
        self._before("files")
        return super().files(path)

    def names(self, path: Path) -> list[str]:
        self._before("names")
        return super().names(path)

    def open_new(self, path: Path) -> int:
        self._before("open_new")
        fd = super().open_new(path)
        self._paths[fd] = path
        self._unsynced.add(path)
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        self._before("write")
        return super().write(fd, data[: max(1, len(data) // 2)] if self.is_short else data)

    def sync(self, fd: int) -> None:
        self._before("sync")
        self._unsynced.discard(self._paths[fd])

    def rename(self, path: Path, to: Path) -> None:
        self._before("rename")
        super().rename(path, to)
        self._unsynced.discard(to)
        if path in self._unsynced:
            self._unsynced.remove(path)
            self._unsynced.add(to)

    def open_old(self, path: Path) -> int:
        self._before("open_old")
        return super().open_old(path)

    def is_own(self, fd: int) -> bool:
        self._before("is_own")
        return super().is_own(fd)

    def read(self, fd: int, into: memoryview) -> int:
        self._before("read")
        num = super().read(fd, into[: max(1, len(into) // 2)] if self.is_short else into)
        if num and self.flip():
            into[num - 1] ^= 4
        return num

    def note_use(self, fd: int) -> None:
        self._before("note_use")
        super().note_use(fd)

    def now_ns(self) -> int:
        return super().now_ns() + self.ahead_ns

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)  # first: a failed close has closed
        self._before("close")

    def remove(self, path: Path) -> None:
        self._before("remove")
        super().remove(path)

    def cut_power(self, choose: random.Random) -> None:
        """Lose what was not synced: a file is empty then, shorter, or has zeros in its place."""
        for path in self._unsynced:
            if not path.exists():
                continue
            size = path.stat().st_size
            kind = choose.choice(["empty", "shorter", "zeros"])
            if kind == "zeros":
                path.write_bytes(bytes(size))
            else:
                os.truncate(path, 0 if kind == "empty" else choose.randint(0, size))
        self._unsynced.clear()


def sometimes(
    choose: random.Random,
    share: float,
    numbers: tuple[int, ...] = (errno.EIO,),
    among: tuple[str, ...] = (),
) -> Callable[[str], int | None]:
    """Return a `FaultyCalls.fault` that fails a share of the calls, `among` these (empty: all)."""

    def fault(name: str) -> int | None:
        if among and name not in among:
            return None
        return choose.choice(numbers) if choose.random() < share else None

    return fault
