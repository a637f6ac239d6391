"""An object whose calls are written down."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar, cast

WriteCall = Callable[[str, tuple[Any, ...], dict[str, Any], Any], object]
"""Takes the name of a call, its arguments, those by name, and what it returned or raised."""

T = TypeVar("T")


def recorded(machine: T, names: Collection[str], write: WriteCall) -> T:
    """Return what stands in for `machine`, and has each call of `names` from outside written."""
    return cast(T, _Recorded(machine, names, write))


class _Recorded:
    def __init__(self, machine: Any, names: Collection[str], write: WriteCall) -> None:
        self._machine = machine
        self._write = write
        for name in names:
            setattr(self, name, partial(self._call, name, getattr(machine, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def _call(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            found = call(*given, **named)
        except Exception as error:
            self._write(name, given, named, error)
            raise
        self._write(name, given, named, found)
        return found
