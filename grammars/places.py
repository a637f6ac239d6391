"""Where in a JSON schema a problem is: the innermost part that has the same problem by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAX_TRIES = 200
NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose values are schemas by name."""
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else")
_DEFINITIONS = ("$defs", "definitions")


def place_of(schema: Mapping[str, Any], problem_of: Callable[[dict[str, Any]], str]) -> str:
    """Return a JSON pointer (RFC 6901, as a URI fragment) to the part of `schema` at fault.

    `problem_of` returns the problem of a schema, '' for a good one. It is called at most 200 times.
    """
    wanted = problem_of(dict(schema))
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    path, part, num_tries = "#", schema, 0
    while True:
        for step, child in _children(part):
            num_tries += 1
            if num_tries > _MAX_TRIES:
                return path
            if problem_of({**shared, **child}) == wanted:
                path, part = f"{path}/{step}", child
                break
        else:
            return path


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in NAMED_PARTS:
        value = schema.get(name)
        if isinstance(value, dict):
            for key, child in value.items():
                if isinstance(child, dict):
                    yield f"{name}/{_escaped(key)}", child
    for name in _LISTED:
        value = schema.get(name)
        if isinstance(value, list):
            for index, child in enumerate(value):
                if isinstance(child, dict):
                    yield f"{name}/{index}", child
    for name in _SINGLE:
        value = schema.get(name)
        if isinstance(value, dict):
            yield name, value


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
