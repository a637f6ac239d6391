"""The parts of a JSON schema, each once, as copies that may be changed; the types of values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grammars.places import NAMED_PARTS

DATA = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
"""Keywords whose values are no schemas."""
TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})
"""The types of JSON values, integers as numbers."""


def type_of(value: Any) -> str:
    """Return the type of a JSON value, one of `TYPES`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def copied_parts(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `whole` and every part in it, each to be changed before the next one is asked for.

    The parts are copies, which stand in `whole` in place of what stood there.
    """
    left = [whole]
    while left:  # no recursion: the depth of a schema is checked elsewhere
        part = left.pop()
        yield part
        left += _copied_children(part)


def _copied_children(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Replace the parts of a schema by copies, and return these."""
    for key, value in part.items():
        if key in DATA:
            continue
        if isinstance(value, dict):
            part[key] = copied = dict(value)
            if key not in NAMED_PARTS:
                yield copied
                continue
            for name, inner in copied.items():
                if isinstance(inner, dict):
                    copied[name] = child = dict(inner)
                    yield child
        elif isinstance(value, list):
            part[key] = listed = [dict(one) if isinstance(one, dict) else one for one in value]
            yield from (one for one in listed if isinstance(one, dict))
