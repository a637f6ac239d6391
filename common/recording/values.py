"""Values of this project as JSON, and back.

A dataclass or a named tuple is an object with its name and the fields that differ from their
defaults. Tuples and lists are both lists, and are read as tuples. A typed error has its text. The
text of another one may be anything: it has only its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from common.errors import PdserveError

_IS = "is"
_VALUE = "value"


def as_json(value: Any) -> Any:
    """Return a value as JSON values. Raises `TypeError` for one that cannot be recorded."""
    if value is None or (
        isinstance(value, str | bool | int | float) and not isinstance(value, Enum)
    ):
        return value
    if isinstance(value, Enum):
        return {_IS: type(value).__name__, _VALUE: value.value}
    if isinstance(value, bytes):
        return {_IS: "bytes", _VALUE: value.hex()}
    if isinstance(value, Exception):
        text = {_VALUE: str(value)} if isinstance(value, PdserveError) else {}
        return {_IS: type(value).__name__, **text}
    if isinstance(value, set | frozenset):
        return {_IS: "frozenset", _VALUE: sorted(map(as_json, value), key=str)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind: Any = type(value)
        defaults = kind._field_defaults
        return _object(value, {name: defaults.get(name, _MISSING) for name in kind._fields})
    if isinstance(value, tuple | list):
        return [as_json(one) for one in value]
    if dataclasses.is_dataclass(value):
        made = [field for field in dataclasses.fields(value) if field.init]
        return _object(value, {field.name: field.default for field in made})
    raise TypeError(f"{type(value).__name__} cannot be recorded")


class _Missing:
    """Equals nothing."""


_MISSING = _Missing()


def _object(value: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {_IS: type(value).__name__}
    for name, default in defaults.items():
        one = getattr(value, name)
        if type(one) is not type(default) or one != default:
            found[name] = as_json(one)
    return found


class ValueReader:
    """Makes values of some types out of JSON values."""

    def __init__(self, *types: type[Any]) -> None:
        self._types = {one.__name__: one for one in types}

    def read(self, found: Any) -> Any:
        """Return the value that `as_json` was given. Raises `ValueError` for anything else."""
        if isinstance(found, list):
            return tuple(map(self.read, found))
        if not isinstance(found, dict):
            return found
        fields = dict(found)
        name = fields.pop(_IS, None)
        if name == "bytes":
            return bytes.fromhex(fields[_VALUE])
        if name == "frozenset":
            return frozenset(map(self.read, fields[_VALUE]))
        known = self._types.get(name) if isinstance(name, str) else None
        if known is None:
            raise ValueError(f"{name!r} is not known")
        if issubclass(known, Enum | PdserveError):
            return known(fields[_VALUE])
        try:
            return known(**{field: self.read(value) for field, value in fields.items()})
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from error
