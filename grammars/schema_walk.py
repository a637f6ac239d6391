"""The parts of a JSON schema, each once, as copies to be changed; what references name; types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from grammars.places import NAMED_PARTS

DATA = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
"""Keywords whose values are no schemas."""
TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})
"""The types of JSON values, integers as numbers."""
_MOST_REFERENCES = 16
"""References that name one another in a row; some name themselves."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
"""How JSON pointers have the index of an item; no list has more items."""


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


def referred(reference: str, whole: Mapping[str, Any], anchors: Mapping[str, Any]) -> Any:
    """Return what a reference names; None where that is not known."""
    own = whole.get("$id")
    if isinstance(own, str):
        reference = reference.removeprefix(own.rstrip("#"))
    if reference and not reference.startswith("#"):
        return None
    fragment = unquote(reference[1:])
    if fragment and not fragment.startswith("/"):
        return anchors.get(fragment)
    found: Any = whole
    for step in fragment.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


class Targets:
    """What the references of a schema name, as far as they are pointers and nothing has an address
    of its own."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        """Read references to `whole`, which is not changed meanwhile."""
        self._whole = whole
        self._has_addresses: bool | None = None
        self._known: dict[str, Any] = {}
        self._types: dict[int, frozenset[str]] = {}

    def types_in(self, values: list[Any]) -> frozenset[str]:
        """Return the types of the values of a list that is part of what is read, which many
        references may name: it is read once."""
        if id(values) not in self._types:
            self._types[id(values)] = frozenset(map(type_of, values))
        return self._types[id(values)]

    def of(self, part: Any) -> Any:
        """Return the schema that is meant by a part: itself, or what it refers to; None: unknown.

        What stands beside a reference, which earlier drafts ignore, only takes values away.
        """
        for _ in range(_MOST_REFERENCES):
            if not isinstance(part, Mapping) or "$ref" not in part:
                return part
            reference = part["$ref"]
            if not isinstance(reference, str) or self.are_ambiguous():
                return None
            if reference not in self._known:
                self._known[reference] = referred(reference, self._whole, {})
            part = self._known[reference]
        return None

    def are_ambiguous(self) -> bool:
        """Return whether a part has an address of its own, which references in it are about."""
        if self._has_addresses is None:
            self._has_addresses, left = False, list(self._whole.values())
            while left and not self._has_addresses:
                one = left.pop()
                self._has_addresses = isinstance(one, Mapping) and "$id" in one
                if isinstance(one, Mapping):
                    left += one.values()
                elif isinstance(one, list):
                    left += one
        return self._has_addresses
