"""Bounds of numbers with fractions, of which the compiler's ranges miss some numbers or have more.

llguidance makes a range a regular expression. In it a number has a digit more than what it shares
with a bound: under a maximum of 0.95, 0.9 could not be written, and would become 0.90 or 0.95. And
an exclusive bound that is an integer is in the range where the other bound is less than 1 from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from typing import Any

from grammars.numbers.exact_numbers import MAX_EXACT
from grammars.numbers.multiples import is_multiple, larger_fractions

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_NOTHING_MORE = frozenset(_BOUNDS) | {
    "type",
    "multipleOf",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
}
"""Keywords of a part that is a range of numbers and nothing else."""
_DIGITS = 15
"""Significant digits that a float of any size holds."""


@dataclass(frozen=True, slots=True)
class _Range:
    """The bounds of a part; None where it has none."""

    lower: Decimal | None
    upper: Decimal | None
    is_above: bool
    """Whether the lower bound itself is not in it; `is_below` likewise."""
    is_below: bool

    def has(self, value: Decimal) -> bool:
        """Return whether `value` is in it."""
        if value in (self.lower, self.upper):
            return not (self.is_above if value == self.lower else self.is_below)
        is_over = self.lower is None or value > self.lower
        return is_over and (self.upper is None or value < self.upper)


def without_excluded_bound(part: dict[str, Any]) -> None:
    """Move an exclusive bound that would be in the range, by as little as a float can tell."""
    span = _range_of(part)
    if span is None or span.lower is None or span.upper is None:
        return
    width = span.upper - span.lower
    if span.is_above and span.lower >= 0 and (step := _step(span.lower, width)):
        _move(part, "minimum", "exclusiveMinimum", span.lower + step)
    elif span.is_below and span.upper <= 0 and (step := _step(span.upper, width)):
        _move(part, "maximum", "exclusiveMaximum", span.upper - step)


def with_every_decimal(part: dict[str, Any]) -> None:
    """Add the numbers in the range whose digits begin those of a bound, and short multiples."""
    if not part.keys() <= _NOTHING_MORE or not _takes_fractions(part):
        return
    whole, multiple = dict(part), part.get("multipleOf")
    choices = [whole, *(whole | {"multipleOf": one} for one in larger_fractions(multiple))]
    span = _range_of(part)
    beginnings = () if span is None else filter(span.has, _beginnings(span))
    missing = sorted({float(one) for one in beginnings if is_multiple(one, multiple)})
    if missing:
        choices.append({"enum": missing})
    if len(choices) > 1:
        part.clear()
        part["anyOf"] = choices


def _range_of(part: Mapping[str, Any]) -> _Range | None:
    """Return the range of a part that takes numbers with fractions; None for any other one."""
    if not _takes_fractions(part) or not any(key in part for key in _BOUNDS):
        return None
    if not all(_is_bound(part[key], key) for key in _BOUNDS if key in part):
        return None
    lowers = _bounds(part, "minimum", "exclusiveMinimum")
    uppers = _bounds(part, "maximum", "exclusiveMaximum")
    lower, is_above = max(lowers, default=(None, False))
    upper, is_included = min(((at, not out) for at, out in uppers), default=(None, True))
    return _Range(lower, upper, is_above=is_above, is_below=not is_included)


def _takes_fractions(part: Mapping[str, Any]) -> bool:
    kind = part.get("type", "number")
    return bool(kind == "number" or (isinstance(kind, list) and "number" in kind))


def _is_bound(value: object, key: str) -> bool:
    if isinstance(value, bool):  # as the fourth draft has it
        return key.startswith("exclusive")
    return isinstance(value, int | float) and abs(value) < MAX_EXACT


def _bounds(part: Mapping[str, Any], key: str, exclusive: str) -> list[tuple[Decimal, bool]]:
    """Return the bounds on one side, each with whether it is exclusive."""
    own, other = part.get(key), part.get(exclusive)
    named = [(own, other is True), (None if isinstance(other, bool) else other, True)]
    return [(Decimal(str(one)), is_out) for one, is_out in named if one is not None]


def _is_whole(value: Decimal) -> bool:
    return value == value.to_integral_value()


def _step(bound: Decimal, width: Decimal) -> Decimal:
    """Return by how much to move an exclusive bound of a range; 0 where it is not in the range."""
    if not _is_whole(bound) or not 0 < width < 1:
        return Decimal(0)
    step = Decimal(1).scaleb((bound or width).adjusted() + 1 - _DIGITS)
    return step if step < width else Decimal(0)


def _move(part: dict[str, Any], key: str, exclusive: str, bound: Decimal) -> None:
    del part[exclusive]
    part[key] = float(bound)


def _beginnings(span: _Range) -> Iterator[Decimal]:
    """Yield the numbers, with a fraction, whose digits begin those of a bound."""
    for bound in (span.lower, span.upper):
        if bound is None:
            continue
        exponent = bound.normalize().as_tuple().exponent
        assert isinstance(exponent, int)
        for place in range(min(-1, bound.adjusted()), exponent, -1):
            one = bound.quantize(Decimal(1).scaleb(place), rounding=ROUND_DOWN)
            if not _is_whole(one):
                yield one
