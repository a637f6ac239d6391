"""An object whose calls are written down.

What cannot be written ends the recording, and never what is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar, cast

from common.recording.file import RecordingFile

log = logging.getLogger("pdserve.recording")

WriteCall = Callable[[str, tuple[Any, ...], dict[str, Any], Any], object]
"""Takes the name of a call, its arguments, those by name, and what it returned or raised."""

T = TypeVar("T")


def recorded(machine: T, names: Collection[str], write: WriteCall, file: RecordingFile) -> T:
    """Return what stands in for `machine`, and has each call of `names` from outside written.

    Nothing is, once `file` is closed; an exception of `write` closes it.
    """
    return cast(T, _Recorded(machine, names, write, file))


class _Recorded:
    def __init__(
        self, machine: Any, names: Collection[str], write: WriteCall, file: RecordingFile
    ) -> None:
        self._machine = machine
        self._write, self._file = write, file
        for name in names:
            setattr(self, name, partial(self._call, name, getattr(machine, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def _call(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            found = call(*given, **named)
        except Exception as error:
            self._record(name, given, named, error)
            raise
        self._record(name, given, named, found)
        return found

    def _record(self, name: str, given: tuple[Any, ...], named: dict[str, Any], found: Any) -> None:
        if not self._file.is_open:
            return
        try:
            self._write(name, given, named, found)
        except Exception:
            log.exception("a call of %s cannot be recorded: %s ends here", name, self._file.path)
            self._file.close()
