"""Bounds of grammars that are counted before they are compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from common.errors import InvalidRequest
from grammars.places import escaped

MAX_DEPTH = 64
"""Of objects and lists within each other in a schema: llguidance reads 128 in all."""
MAX_OPTIONAL = 1_000
"""Optional properties of one object: behind a comma each of them may come, and a step of the
parser looks at all of them."""
MAX_MULTIPLE = 100_000
"""Of `multipleOf`, its decimal point left out: each remainder is a state of the lexer, of 250 B.
Powers of ten have as many states as digits."""
MAX_PATTERNS = 12
"""Patterns that one text must all match, by `allOf`: their states multiply."""
MAX_EMBEDDED = 256
"""JSON schemas within one Lark grammar; a tool's arguments are one."""
LEAST_INTEGER = 513 - 2**63
"""Of 64 bits. For those below, which are -2**63 as floating-point numbers, the compiler's recursion
has no end; numbers of more bits are none of its integers."""

_JSON = re.compile(r"%json\s*")


def check_bounds(schema: Mapping[str, Any], source: str) -> None:
    """Raise `InvalidRequest` for a schema beyond one of the bounds, with the place.

    Recursion is not used: a schema may have more levels than Python's stack.
    """
    parts: Sequence[tuple[str, Any]] = [("#", schema)]
    for _ in range(MAX_DEPTH):
        inner: list[tuple[str, Any]] = []
        for place, part in parts:
            if isinstance(part, Mapping):
                _check_object(part, place, source)
            named = part.items() if isinstance(part, Mapping) else enumerate(part)
            for name, value in named:
                if isinstance(value, Mapping | list):
                    inner.append((f"{place}/{escaped(str(name))}", value))
                elif isinstance(value, int) and -(2**63) <= value < LEAST_INTEGER:
                    _check_number(value, f"{place}/{escaped(str(name))}", source)
        if not inner:
            return
        parts = inner
    raise InvalidRequest(
        f"the JSON schema has more than {MAX_DEPTH} levels: wanted at most {MAX_DEPTH}",
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


def _check_object(schema: Mapping[str, Any], place: str, source: str) -> None:
    _check_optional(schema, place, source)
    _check_multiple(schema.get("multipleOf"), place, source)
    together = schema.get("allOf")
    if isinstance(together, list):
        num_patterns = sum(isinstance(one, dict) and "pattern" in one for one in together)
        if num_patterns > MAX_PATTERNS:
            raise InvalidRequest(
                f"the JSON schema has {num_patterns} patterns in {place}/allOf: wanted at most "
                f"{MAX_PATTERNS}",
                param=source or None,
            )


def _check_optional(schema: Mapping[str, Any], place: str, source: str) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return
    listed = required if isinstance(required, list) else []
    names = {name for name in listed if isinstance(name, str)}
    num_optional = sum(name not in names for name in properties)
    if num_optional > MAX_OPTIONAL:
        raise InvalidRequest(
            f"the JSON schema has {num_optional} optional properties at {place}: wanted at most "
            f"{MAX_OPTIONAL}; names in `required` do not count",
            param=source or None,
        )


def _check_multiple(value: object, place: str, source: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    number = Decimal(str(value))
    if not number.is_finite():
        return
    _, digits, exponent = number.normalize().as_tuple()
    assert isinstance(exponent, int)
    scaled = int("".join(map(str, digits))) * 10 ** max(0, exponent)
    if scaled > MAX_MULTIPLE and digits != (1,):
        raise InvalidRequest(
            f"the JSON schema has a `multipleOf` of {value} at {place}: wanted at most "
            f"{MAX_MULTIPLE}, digits behind the point included, or a power of ten",
            param=source or None,
        )


def _check_number(value: int, place: str, source: str) -> None:
    raise InvalidRequest(
        f"the JSON schema has the number {value} at {place}: wanted at least {LEAST_INTEGER}",
        param=source or None,
    )
