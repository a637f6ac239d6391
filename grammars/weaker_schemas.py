"""Schemas of which parts that cannot be enforced are left out, and those parts alone.

That is for tools that are not strict. What is left out makes a schema weaker, never stronger: where
a part is left out on which the meaning of another one depends, that one goes too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from grammars.bounds import beyond_bounds
from grammars.places import LISTED_PARTS, NAMED_PARTS, SINGLE_PARTS
from grammars.schema_walk import copied_parts

MAX_TRIES = 400
MAX_TRIED_CHARS = 2 << 20
"""Most characters of JSON that are tried for one request."""

_DEPENDENT: Mapping[str, tuple[str, ...]] = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
    "items": ("additionalItems",),
}
"""Keywords that are about what others leave, which grows where those are left out."""
_FIRST = ("$defs", "definitions", "type", "properties", "patternProperties", "prefixItems", "items")
"""Keywords on which others build, in the order in which they are added."""

Fails = Callable[[Mapping[str, Any]], bool]


def leave_out_beyond(part: dict[str, Any]) -> None:
    """Take out of a part of a schema what is beyond a bound, the parts in it not included."""
    for beyond in list(beyond_bounds(part)):
        for keyword in (beyond.keyword, *_DEPENDENT.get(beyond.keyword, ())):
            part.pop(keyword, None)


class _Slot(NamedTuple):
    """A place of a part in an object or a list, and the part that belongs there."""

    holder: Any
    key: Any
    part: Any


class Weakening:
    """Leaves out of schemas the parts because of which they fail.

    A schema is put together again, part by part, and never fails in between. Each test is of a
    whole schema, so references mean the same. Work is counted in tests and in the lengths of what
    is tested; where none is left, parts that were not tested are left out.
    """

    def __init__(self, fails: Fails) -> None:
        """Test with `fails`, which no empty schema does."""
        self._fails = fails
        self._num_left = MAX_TRIES
        self._chars_left = MAX_TRIED_CHARS
        self._top: dict[str, dict[str, Any]] = {"root": {}}
        self._patterns: dict[str, bool] = {}

    def of(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return `schema` without the parts because of which it fails."""
        root: dict[str, Any] = dict(schema)
        for part in copied_parts(root):
            pattern = part.get("pattern")
            if isinstance(pattern, str) and not self._is_good_pattern(pattern):
                del part["pattern"]
        self._top = {"root": {}}
        groups = [[_Slot(self._top, "root", root)]]
        while groups:  # no recursion: a schema may have more levels than Python's stack
            slots = groups.pop()
            before = [slot.holder[slot.key] for slot in slots]
            for slot in slots:
                slot.holder[slot.key] = slot.part
            if self._is_good():
                continue
            for slot, value in zip(slots, before, strict=True):
                slot.holder[slot.key] = value
            if len(slots) > 1:
                half = len(slots) // 2
                groups += [slots[half:], slots[:half]]
            elif isinstance(slots[0].part, dict):
                self._add_keywords(slots[0])
                inner = list(_slots(slots[0].holder[slots[0].key], slots[0].part))
                groups += [inner] if inner else []
        return self._top["root"]

    def _is_good_pattern(self, pattern: str) -> bool:
        """Test a pattern by itself, once: many parts often have the same one."""
        if pattern not in self._patterns:
            self._patterns[pattern] = self._passes({"type": "string", "pattern": pattern})
        return self._patterns[pattern]

    def _is_good(self) -> bool:
        return self._passes(self._top["root"])

    def _passes(self, tried: Mapping[str, Any]) -> bool:
        if not self._num_left:
            return False
        self._num_left -= 1
        self._chars_left -= len(json.dumps(tried))
        if self._chars_left < 0:
            self._num_left = 0
            return False
        return not self._fails(tried)

    def _add_keywords(self, slot: _Slot) -> None:
        """Put the keywords of a part in its place that do not fail, its own parts left open."""
        kept: dict[str, Any] = {}
        out: set[str] = set()
        for keyword in (name for name in _in_order(slot.part) if name not in out):
            value = slot.part[keyword]
            if self._takes(slot, kept, keyword, _hollow(keyword, value)):
                continue
            out.update(_DEPENDENT.get(keyword, ()))
            if keyword == "patternProperties" and isinstance(value, dict):
                for name in value:
                    self._takes(slot, kept, keyword, {**kept.get(keyword, {}), name: True})
        slot.holder[slot.key] = _like(slot.part, kept)

    def _takes(self, slot: _Slot, kept: dict[str, Any], keyword: str, value: Any) -> bool:
        """Add a keyword to those that are `kept`, unless the schema fails with it."""
        slot.holder[slot.key] = _like(slot.part, {**kept, keyword: value})
        is_good = self._is_good()
        if is_good:
            kept[keyword] = value
        return is_good


def _in_order(part: Mapping[str, Any]) -> list[str]:
    first = [name for name in _FIRST if name in part]
    return [*first, *(name for name in part if name not in _FIRST)]


def _like(part: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that are `kept`, in the order of `part`."""
    return {keyword: kept[keyword] for keyword in part if keyword in kept}


def _hollow(keyword: str, value: Any) -> Any:
    """Return the value of a keyword with its parts left open: anything may stand there."""
    if keyword in NAMED_PARTS and isinstance(value, dict):
        return dict.fromkeys(value, True)
    if keyword in LISTED_PARTS and isinstance(value, list):
        return [True] * len(value)
    return True if keyword in SINGLE_PARTS and isinstance(value, dict) else value


def _slots(made: dict[str, Any], part: Mapping[str, Any]) -> Iterator[_Slot]:
    """Yield the places that are open in what was `made` of a part."""
    for keyword in _in_order(made):
        value, original = made[keyword], part[keyword]
        if keyword in NAMED_PARTS and isinstance(value, dict):
            yield from (_Slot(value, name, original[name]) for name in value)
        elif keyword in LISTED_PARTS and isinstance(value, list):
            yield from (_Slot(value, index, one) for index, one in enumerate(original))
        elif keyword in SINGLE_PARTS and isinstance(original, dict):
            yield _Slot(made, keyword, original)
