"""The file of a recording: a header, and then one line of JSON for each call.

It belongs to its owner alone, and nothing is written over. A disk that is full ends the recording,
and never what is recorded.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from common.errors import ConfigError
from common.version import VERSION

log = logging.getLogger("pdserve.recording")

FORMAT = 1
MOST_BYTES = 1 << 30
"""The size of one file; what comes then is not recorded."""
MOST_LINE_BYTES = 64 << 20
FLUSH_S = 1.0
"""A line is in the file at once when the last flush is so long ago. A process that is killed loses
what came since: one buffer at most."""
_BUFFER_BYTES = 1 << 18
_MOST_FILES = 1000
_RECORDING = "recording"
_FULL = "full"


class RecordingFile:
    """A file that is written. Belongs to one thread."""

    def __init__(
        self, folder: Path, name: str, header: dict[str, Any], *, most_bytes: int = MOST_BYTES
    ) -> None:
        """Begin a file of this process in a folder. Raises `ConfigError` where that fails."""
        self.path, self._file = _new_file(folder, name)
        self._num_left = most_bytes
        self._began_s = time.monotonic()
        self._flushed_s = self._began_s - FLUSH_S  # The header is in the file at once.
        self.write({_RECORDING: FORMAT, "version": VERSION, **header})
        log.info("recording to %s", self.path)

    @property
    def is_open(self) -> bool:
        """Whether lines are still written."""
        return self._file is not None

    def write(self, line: dict[str, Any]) -> None:
        """Write a line, and when it was: `at_s`, from the beginning on."""
        file, now_s = self._file, time.monotonic()
        if file is None:
            return
        line["at_s"] = round(now_s - self._began_s, 4)
        written = json.dumps(line, separators=(",", ":")) + "\n"
        self._num_left -= len(written)
        try:
            if self._num_left < 0:
                log.warning("the recording %s is full: it ends here", self.path)
                file.write(json.dumps({_FULL: True}) + "\n")
                self.close()
                return
            file.write(written)
            if now_s - self._flushed_s >= FLUSH_S:
                self._flushed_s = now_s
                file.flush()
        except OSError as error:
            log.warning("the recording %s ends here: %s", self.path, error.strerror)
            self.close()

    def close(self) -> None:
        """End the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.warning("the end of the recording %s is lost: %s", self.path, error.strerror)


def _new_file(folder: Path, name: str) -> tuple[Path, IO[str] | None]:
    """Return the first file of this name that does not exist yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    for number in range(1, _MOST_FILES):
        path = folder / (f"{name}.jsonl" if number == 1 else f"{name}.{number}.jsonl")
        try:
            if not folder.is_dir():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = os.open(path, flags, 0o600)
        except FileExistsError as error:
            if folder.is_dir():
                continue
            raise ConfigError(f"record is {str(folder)!r}: wanted a folder") from error
        except OSError as error:
            raise ConfigError(
                f"record is {str(folder)!r}: {path} cannot be written: {error.strerror}"
            ) from error
        return path, os.fdopen(opened, "w", buffering=_BUFFER_BYTES, encoding="ascii")
    raise ConfigError(f"record is {str(folder)!r}: it has {_MOST_FILES} recordings of {name}")


def is_recording(path: Path) -> bool:
    """Return whether a file begins as a recording does."""
    try:
        with path.open("rb") as file:
            return file.read(len(_RECORDING) + 3).startswith(b'{"' + _RECORDING.encode() + b'"')
    except OSError:
        return False


def read_recording(path: Path) -> tuple[dict[str, Any], Iterator[tuple[int, dict[str, Any]]]]:
    """Return the header of a recording, and its lines with their numbers.

    The last line of a process that was killed may be cut off; it is left out. Raises `ConfigError`,
    also while lines are read, which names the file, the line and what is wrong with it.
    """
    lines = _lines(path)
    _, header = next(lines, (1, {}))
    if header.get(_RECORDING) != FORMAT:
        raise ConfigError(f"{path} is no recording of format {FORMAT}")
    return header, lines


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="ascii") as file:
            number = 1
            while line := file.readline(MOST_LINE_BYTES):
                if not line.endswith("\n"):
                    return
                found = json.loads(line)
                if not isinstance(found, dict):
                    raise ValueError("wanted an object")
                if found.get(_FULL):
                    return
                yield number, found
                number += 1
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
