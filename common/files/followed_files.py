"""Files that a process reads again when they change; broken ones leave it with what it had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from logging import Logger
from pathlib import Path
from typing import TypeVar

from common.errors import ConfigError
from common.files.file_stamp import FileStamp, file_stamp

_Content = TypeVar("_Content")


class FollowedFiles:
    """Made before the files are read first, so that no later change of them is missed."""

    def __init__(self, paths: Sequence[Path], log: Logger, *, stays: str) -> None:
        """Look at the files. `stays` begins the line about broken ones: what stays as it is."""
        self._paths = tuple(paths)
        self._log = log
        self._stays = stays
        self._stamp = self._look()
        self._logged = ""

    def read_if_changed(self, load: Callable[[], _Content]) -> _Content | None:
        """Return what `load` returns, if the files are others than those that were read last.

        Where it raises `ConfigError`, that is logged once, and the next call tries again: an owner
        or a mode that is corrected, or a date that comes, shows in no stamp. So does the next call
        where the files change while they are read.
        """
        stamp = self._look()
        if stamp == self._stamp:
            self._logged = ""  # files that were broken are again those that were read last
            return None
        try:
            content = load()
        except ConfigError as broken:
            if str(broken) != self._logged:
                self._logged = str(broken)
                self._log.error("%s: %s", self._stays, broken)
            return None
        if self._look() != stamp:
            return None
        self._stamp, self._logged = stamp, ""
        return content

    def _look(self) -> tuple[FileStamp, ...]:
        return tuple(map(file_stamp, self._paths))
