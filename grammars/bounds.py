"""Bounds of grammars that are counted before they are compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, auto
from typing import Any

from common.errors import InvalidRequest
from grammars.numbers.exact_numbers import (
    GREATEST_INTEGER,
    LEAST_INTEGER,
    MAX_EXACT,
    MAX_OPEN,
    inexact_numbers,
    open_bounds,
)
from grammars.places import NAMED_PARTS, escaped
from grammars.schema_walk import DATA

MAX_DEPTH = 64
"""Most levels of objects and lists in a schema: llguidance reads 128 in all."""
MAX_OPTIONAL = 1_000
"""Optional properties of one object: after a comma each of them may come, and a step of the
parser looks at all of them."""
MAX_MULTIPLE = 100_000
"""Largest `multipleOf`, its decimal point left out: a remainder is a state of the lexer, of 250 B.
Powers of ten have as many states as digits."""
MAX_PATTERNS = 12
"""Patterns that one text must all match, by `allOf`: their states multiply."""
MAX_EMBEDDED = 257
"""JSON schemas within one Lark grammar: a tool's arguments are one, and so is an answer's text."""

_MAX_DIGITS = 40
_WANTED_NUMBER = f"one from {LEAST_INTEGER} to {GREATEST_INTEGER}"
_WANTED_EXACT = f"at most {MAX_EXACT}, up or down, or one that a 64-bit float holds"
_WANTED_NEIGHBOUR = f"{_WANTED_EXACT} together with the integer next to it"

_JSON = re.compile(r"%json\s*")


def check_bounds(
    schema: Mapping[str, Any], source: str, *, called: str = "the JSON schema"
) -> None:
    """Raise `InvalidRequest` for a schema beyond one of the bounds, with the place.

    Recursion is not used: a schema may have more levels than Python's stack.
    """
    parts: Sequence[tuple[str, Any, _Kind]] = [("#", schema, _Kind.SCHEMA)]
    for _ in range(MAX_DEPTH):
        inner: list[tuple[str, Any, _Kind]] = []
        for place, part, kind in parts:
            if isinstance(part, Mapping):
                for beyond in beyond_bounds(part, has_numbers=kind is _Kind.SCHEMA):
                    raise InvalidRequest(f"{called} has {beyond.told(place)}", param=source or None)
            named = part.items() if isinstance(part, Mapping) else enumerate(part)
            inner += [
                (f"{place}/{escaped(str(name))}", value, _kind_of(name, kind))
                for name, value in named
                if isinstance(value, Mapping | list)
            ]
        if not inner:
            return
        parts = inner
    raise InvalidRequest(
        f"{called} has more than {MAX_DEPTH} levels: wanted at most {MAX_DEPTH}",
        param=source or None,
    )


def check_lark(text: str, source: str) -> None:
    """Raise `InvalidRequest` for a Lark grammar with a JSON schema beyond one of the bounds.

    Whatever looks like a schema is taken for one, within comments and literals too: nothing is
    hidden from this by how the text is read.
    """
    decoder, num_schemas = json.JSONDecoder(), 0
    for begin in _JSON.finditer(text):
        num_schemas += 1
        if num_schemas > MAX_EMBEDDED:
            raise InvalidRequest(
                f"the grammar has more than {MAX_EMBEDDED} JSON schemas: wanted at most "
                f"{MAX_EMBEDDED}",
                param=source or None,
            )
        try:
            schema, _ = decoder.raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong; it reads 128 levels
        if isinstance(schema, dict):
            check_bounds(schema, source)


class _Kind(Enum):
    """What an object or a list of a schema is. References may make a schema of data as well."""

    SCHEMA = auto()
    NAMES = auto()
    DATA = auto()


def _kind_of(name: str | int, around: _Kind) -> _Kind:
    """Return what stands under a keyword, a name or an index."""
    if around is not _Kind.SCHEMA:
        return _Kind.SCHEMA if around is _Kind.NAMES else _Kind.DATA
    if name in NAMED_PARTS:
        return _Kind.NAMES
    return _Kind.DATA if name in DATA else _Kind.SCHEMA


@dataclass(frozen=True, slots=True)
class Beyond:
    """A keyword of a schema that is beyond a bound, and the sentence about it."""

    keyword: str
    what: str
    wanted: str
    within: str = ""

    def told(self, place: str) -> str:
        """Return what is told of it in the part at `place`."""
        return f"{self.what} at {place}{self.within}: wanted {self.wanted}"


def beyond_bounds(schema: Mapping[str, Any], *, has_numbers: bool = True) -> Iterator[Beyond]:
    """Yield what is beyond a bound in one part of a schema, the parts in it not included.

    `has_numbers`: its bounds and constants count, too.
    """
    num_optional = _num_optional(schema)
    if num_optional > MAX_OPTIONAL:
        what = f"{num_optional} optional properties"
        wanted = f"at most {MAX_OPTIONAL}; names in `required` do not count"
        yield Beyond("properties", what, wanted)
    multiple = schema.get("multipleOf")
    if _has_many_remainders(multiple):
        wanted = f"at most {MAX_MULTIPLE}, digits behind the point included, or a power of ten"
        yield Beyond("multipleOf", f"a `multipleOf` of {multiple}", wanted)
    together = schema.get("allOf")
    if isinstance(together, list):
        num_patterns = sum(isinstance(one, dict) and "pattern" in one for one in together)
        if num_patterns > MAX_PATTERNS:
            wanted = f"at most {MAX_PATTERNS}"
            yield Beyond("allOf", f"{num_patterns} patterns", wanted, "/allOf")
    for place, number in inexact_numbers(schema) if has_numbers else ():
        what = f"the number {_shown(number)}"
        yield Beyond(place.partition("/")[0], what, _wanted(place, number), f"/{place}")
    for keyword, bound, missing in open_bounds(schema) if has_numbers else ():
        what = f"the number {_shown(bound)}"
        yield Beyond(
            keyword, what, f"less than {MAX_OPEN}, up or down, or a `{missing}` too", f"/{keyword}"
        )


def _num_optional(schema: Mapping[str, Any]) -> int:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return 0
    listed = required if isinstance(required, list) else []
    names = {name for name in listed if isinstance(name, str)}
    return sum(name not in names for name in properties)


def _has_many_remainders(multiple: object) -> bool:
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return False
    number = Decimal(str(multiple))
    if not number.is_finite():
        return False
    _, digits, exponent = number.normalize().as_tuple()
    assert isinstance(exponent, int)
    scaled = int("".join(map(str, digits))) * 10 ** max(0, exponent)
    return scaled > MAX_MULTIPLE and digits != (1,)


def _wanted(place: str, number: int | float) -> str:
    """Return what is wanted in place of a number that is not held as it is."""
    if not LEAST_INTEGER <= number <= GREATEST_INTEGER:
        return _WANTED_NUMBER
    return _WANTED_NEIGHBOUR if place.startswith("exclusive") else _WANTED_EXACT


def _shown(number: int | float) -> str:
    text = str(number)
    return text if len(text) <= _MAX_DIGITS else f"{text[:_MAX_DIGITS]}…"
