"""Numbers of JSON schemas that the compiler would take for others.

llguidance has every number as a 64-bit float, and bounds of integers as 64-bit integers: beyond
2^53 most integers become a neighbour, and beyond 2^63 the last one of 64 bits. An identifier that
does not exist would be written, so what is not held as it is, is not enforced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from grammars.places import escaped

MAX_EXACT = 2**53
"""Largest number up to which, and down to its negative, every integer is exact."""
LEAST_INTEGER = 513 - 2**63
"""Least integer of 64 bits that a schema may have. Those below are -2**63 as floating-point
numbers, and the compiler's recursion has no end."""
GREATEST_INTEGER = 2**63 - 1
MAX_OPEN = 10**18
"""A minimum without a maximum is less than this, and a maximum without a minimum more than its
negative: the compiler has ranges up to the next power of ten, in 64 bits."""
_MAX_STEPPED = 2**64
"""Largest bound that is replaced; beyond it no integer is held."""
_NUMBERS = ("integer", "number")
_BOUNDS = {"minimum": 0, "maximum": 0, "exclusiveMinimum": 1, "exclusiveMaximum": -1}
"""What lies between a bound and the first integer that it allows."""
_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}


def inexact_numbers(part: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield the place within `part` and the value of each number that is not held as it is.

    Only its own numbers, not those of the parts in it. The place begins with the keyword.
    """
    kinds = _kinds(part)
    for keyword, step in _BOUNDS.items():
        bound = part.get(keyword)
        if _is_number(bound) and not _is_exact_bound(bound, step, kinds):
            yield keyword, bound
    for keyword in ("const", "enum"):
        if keyword in part:
            yield from _inexact_values(part[keyword], keyword, are_integers="integer" in kinds)


def open_bounds(part: Mapping[str, Any]) -> Iterator[tuple[str, int | float, str]]:
    """Yield the keyword, the value and the missing other keyword of each bound of `MAX_OPEN`.

    Bounds that are not held as they are do not count.
    """
    kinds = _kinds(part)
    for side, other, sign in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
        if any(_is_number(part.get(keyword)) for keyword in (other, _EXCLUSIVE[other])):
            continue
        for keyword in (side, _EXCLUSIVE[side]):
            bound = part.get(keyword)
            if not _is_number(bound) or not kinds or not bound * sign >= MAX_OPEN:
                continue
            if _is_exact_bound(bound, _BOUNDS[keyword], kinds):
                yield keyword, bound, other


def with_whole_bounds(part: dict[str, Any]) -> None:
    """Replace large exclusive bounds of integers by the inclusive ones that say the same.

    The compiler adds 1 to them in floating point, which changes nothing beyond 2^53.
    """
    kinds = _kinds(part)
    if "integer" not in kinds or "number" in kinds:
        return
    for inclusive, exclusive in _EXCLUSIVE.items():
        bound, other = part.get(exclusive), part.get(inclusive)
        if not _is_number(bound) or not MAX_EXACT <= abs(bound) <= _MAX_STEPPED:
            continue
        if other is None or _is_number(other):
            first = int(part.pop(exclusive)) + _BOUNDS[exclusive]
            nearest = max if inclusive == "minimum" else min
            part[inclusive] = first if other is None else nearest(first, other)


def _kinds(part: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of numbers that a part takes; without a type the compiler takes "number"."""
    kind = part.get("type", "number")
    named = kind if isinstance(kind, list) else [kind]
    return frozenset(one for one in named if one in _NUMBERS)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact_bound(bound: int | float, step: int, kinds: frozenset[str]) -> bool:
    if isinstance(bound, float) and not math.isfinite(bound):
        return False
    if "number" in kinds and "integer" in kinds:
        return abs(bound) < MAX_EXACT
    if "integer" not in kinds:
        return LEAST_INTEGER <= bound <= GREATEST_INTEGER and int(float(bound)) == int(bound)
    if isinstance(bound, float) and not bound.is_integer():
        return True
    return _is_exact_integer(int(bound) + step)


def _inexact_values(value: Any, place: str, *, are_integers: bool) -> Iterator[tuple[str, Any]]:
    """Yield what of a constant is not held."""
    left = [(place, value)]
    while left:
        at, one = left.pop()
        if isinstance(one, Mapping):
            left += [(f"{at}/{escaped(str(key))}", inner) for key, inner in one.items()]
        elif isinstance(one, list):
            left += [(f"{at}/{index}", inner) for index, inner in enumerate(one)]
        elif _is_number(one) and not _is_exact_value(one, are_integers=are_integers):
            yield at, one


def _is_exact_value(value: int | float, *, are_integers: bool) -> bool:
    if isinstance(value, int):
        return _is_exact_integer(value)
    return math.isfinite(value) and (not are_integers or _is_exact_integer(int(value)))


def _is_exact_integer(value: int) -> bool:
    if value == GREATEST_INTEGER:  # the float above it becomes this one again
        return True
    return LEAST_INTEGER <= value < GREATEST_INTEGER and int(float(value)) == value
