"""Choices of JSON schemas that exclude each other, so that `oneOf` says the same as `anyOf`.

llguidance knows choices of different types, texts, and objects with a property that tells them
apart. It refuses others, such as two ranges of numbers, or -1 beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import Any

from grammars.schema_walk import TYPES, Targets, referred, type_of

_MOST_CHOICES = 64
"""Each pair is looked at."""
_MOST_LEVELS = 4
"""Objects within each other that are looked into for a property that tells two apart."""
_MOST_READ = 20_000
"""Keywords, values and properties of referred parts that are read in one schema: 20 ms."""
_SIZES = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


class OneOf:
    """Finds in one schema which choices exclude each other. References in it are followed."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        """Look at parts of `whole`, which is not changed meanwhile."""
        self._targets = Targets(whole)
        self._num_left = _MOST_READ
        self._has_replaced = False

    def with_any_of(self, part: dict[str, Any]) -> None:
        """Replace `oneOf` in a part of the schema where no value can be of two of its choices."""
        choices = part.get("oneOf")
        if not isinstance(choices, list) or "anyOf" in part or len(choices) > _MOST_CHOICES:
            return
        kinds = _kinds_of(part)
        if all(self._exclude(one, other, kinds, 0) for one, other in combinations(choices, 2)):
            part["anyOf"] = part.pop("oneOf")
            self._has_replaced = True

    def rename(self, whole: Mapping[str, Any], parts: Sequence[dict[str, Any]]) -> None:
        """Let references of `parts` name choices as they are now in `whole`, a changed copy."""
        if not self._has_replaced or self._targets.are_ambiguous():
            return
        for part in parts:
            reference = part.get("$ref")
            if isinstance(reference, str) and "/oneOf/" in reference:
                part["$ref"] = _renamed(reference, whole)

    def _exclude(
        self, one: Any, other: Any, kinds: frozenset[str], level: int, *, is_referred: bool = False
    ) -> bool:
        """Return whether it is certain that no value of these `kinds` is of both schemas.

        What is read by references is bounded: the same part may be named again and again.
        """
        if one is False or other is False:
            return True
        mine, others = self._targets.of(one), self._targets.of(other)
        is_referred = is_referred or mine is not one or others is not other
        one, other = mine, others
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return one is False or other is False
        if is_referred:
            self._num_left -= _size(one) + _size(other)
            if self._num_left < 0:
                return False
        if _are_apart(_values(one), other) or _are_apart(_values(other), one):
            return True
        for kind in kinds & _kinds_of(one) & _kinds_of(other):
            is_apart = (
                level < _MOST_LEVELS
                and any(
                    self._exclude(*both, TYPES, level + 1, is_referred=is_referred)
                    for both in _in_both(one, other)
                )
                if kind == "object"
                else _exclude_in_kind(kind, one, other)
            )
            if not is_apart:
                return False
        return True


def _renamed(reference: str, whole: Mapping[str, Any]) -> str:
    """Return a pointer with `anyOf` for each `oneOf` on its way that `whole` has no more."""
    steps = reference.split("/")
    for at, step in enumerate(steps):
        if step == "oneOf":
            around = referred("/".join(steps[:at]), whole, {})
            if not isinstance(around, Mapping):
                break
            if "oneOf" not in around and "anyOf" in around:
                steps[at] = "anyOf"
    return "/".join(steps)


def _size(part: Mapping[str, Any]) -> int:
    """Return how much of a part is read at most, the parts in it not included."""
    return 1 + sum(len(value) for value in part.values() if isinstance(value, Mapping | list))


def _exclude_in_kind(kind: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if kind == "number":
        return _is_below(one, other) or _is_below(other, one)
    if kind in _SIZES:
        least, most = _SIZES[kind]
        return _is_less(one.get(most), other.get(least)) or _is_less(
            other.get(most), one.get(least)
        )
    return False


def _in_both(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the schemas of each property that both require."""
    mine, others = _required(one), _required(other)
    yield from ((mine[name], others[name]) for name in mine.keys() & others.keys())


def _required(part: Mapping[str, Any]) -> dict[str, Any]:
    named, required = part.get("properties"), part.get("required")
    if not isinstance(named, Mapping) or not isinstance(required, list):
        return {}
    return {name: named[name] for name in required if isinstance(name, str) and name in named}


def _kinds_of(part: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that the values of a part may have, integers as numbers."""
    kind = part.get("type", None)
    named = kind if isinstance(kind, list) else [kind]
    if not all(isinstance(one, str) for one in named):
        return TYPES
    return frozenset("number" if one == "integer" else one for one in named)


def _values(part: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values of a part that lists them; None for any other one."""
    if "const" in part:
        return [part["const"]]
    listed = part.get("enum")
    return listed if isinstance(listed, list) else None


def _are_apart(values: Sequence[Any] | None, part: Mapping[str, Any]) -> bool:
    """Return whether certainly none of these values is one of a part."""
    if values is None:
        return False
    listed = _values(part)
    if listed is not None:
        return {_key(one) for one in values}.isdisjoint(_key(one) for one in listed)
    return not any(_may_be(one, part) for one in values)


def _key(value: Any) -> tuple[str, Any]:
    """Return a key that equal values share, as all lists do and all objects."""
    kind = type_of(value)
    return kind, None if kind in ("array", "object") else value


def _may_be(value: Any, part: Mapping[str, Any]) -> bool:
    """Return whether a value may be one of a part that lists none."""
    kind = type_of(value)
    is_outside = kind == "number" and (
        _is_below({"maximum": value}, part) or _is_below(part, {"minimum": value})
    )
    return kind in _kinds_of(part) and not is_outside


def _is_below(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether every number of a range is below every number of another one."""
    return any(
        bound < least or (bound == least and (is_out or is_least_out))
        for bound, is_out in _bounds(one, "maximum", "exclusiveMaximum")
        for least, is_least_out in _bounds(other, "minimum", "exclusiveMinimum")
    )


def _bounds(part: Mapping[str, Any], key: str, exclusive: str) -> Iterator[tuple[Decimal, bool]]:
    """Yield the bounds on one side, each with whether the bound itself is out of the range."""
    # In the fourth draft the exclusive one is true or false.
    for value, is_out in (
        (part.get(key), part.get(exclusive) is True),
        (part.get(exclusive), True),
    ):
        if type_of(value) == "number" and Decimal(str(value)).is_finite():
            yield Decimal(str(value)), is_out


def _is_less(most: Any, least: Any) -> bool:
    return type_of(most) == type_of(least) == "number" and bool(most < least)
