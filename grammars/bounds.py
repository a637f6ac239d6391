"""Bounds of a JSON schema that are counted before it is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from grammars.places import escaped

MAX_DEPTH = 64
"""Of objects and lists within each other in a schema: llguidance reads 128 in all."""
MAX_OPTIONAL = 1_000
"""Optional properties of one object: behind a comma each of them may come, and a step of the
parser looks at all of them."""


def check_bounds(schema: Mapping[str, Any], source: str) -> None:
    """Raise `InvalidRequest` for a schema of too many levels or optional properties.

    Recursion is not used: a schema may have more levels than Python's stack.
    """
    parts: Sequence[tuple[str, Any]] = [("#", schema)]
    for _ in range(MAX_DEPTH):
        inner: list[tuple[str, Any]] = []
        for place, part in parts:
            if isinstance(part, Mapping):
                _check_optional(part, place, source)
            named = part.items() if isinstance(part, Mapping) else enumerate(part)
            inner += [
                (f"{place}/{escaped(str(name))}", value)
                for name, value in named
                if isinstance(value, Mapping | list)
            ]
        if not inner:
            return
        parts = inner
    raise InvalidRequest(
        f"the JSON schema has more than {MAX_DEPTH} levels: wanted at most {MAX_DEPTH}",
        param=source or None,
    )


def _check_optional(schema: Mapping[str, Any], place: str, source: str) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return
    num_required = 0
    if isinstance(required, list):
        num_required = sum(isinstance(name, str) and name in properties for name in required)
    num_optional = len(properties) - num_required
    if num_optional > MAX_OPTIONAL:
        raise InvalidRequest(
            f"the JSON schema has {num_optional} optional properties at {place}: wanted at most "
            f"{MAX_OPTIONAL}; names in `required` do not count",
            param=source or None,
        )
