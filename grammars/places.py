"""Where in a JSON schema a problem is: the innermost part that has the same problem by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_TRIES = 200
MAX_DEAR_TRIES = 10
"""Most trials with all fuel, where little fuel does not show the problem."""
MAX_TRIED_CHARS = 512 << 10
"""Most characters of JSON that are tried: a compilation takes more than fuel, and it grows."""

NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose values are schemas by name."""
LISTED_PARTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE_PARTS = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else")
_DEFINITIONS = ("$defs", "definitions")


class SchemaTrials:
    """A search for the schema that has a problem; its work is bounded.

    Work is counted in trials and in the lengths of what is tried, so that the same schema has the
    same place everywhere.
    """

    def __init__(
        self, has_problem: Callable[[Mapping[str, Any], bool], bool], *, are_cheap: bool
    ) -> None:
        """Try with `has_problem`, which compiles a schema, leniently or not.

        `are_cheap`: it does that with little fuel.
        """
        self._has_problem = has_problem
        self._num_left = MAX_TRIES if are_cheap else MAX_DEAR_TRIES
        self._chars_left = MAX_TRIED_CHARS

    def is_at_fault(self, schema: Mapping[str, Any], *, is_lenient: bool) -> bool:
        """Return whether `schema` has the problem by itself; False where no work is left for it."""
        if not self._num_left:
            return False
        self._num_left -= 1
        num_chars = len(json.dumps(schema))
        if num_chars > self._chars_left:
            return False
        self._chars_left -= num_chars
        return self._has_problem(schema, is_lenient)


def place_of(schema: Mapping[str, Any], trials: SchemaTrials, *, is_lenient: bool = False) -> str:
    """Return a JSON pointer (RFC 6901, as a URI fragment) to the part of `schema` at fault.

    It is the innermost part that `trials` finds at fault, or one around it where no work is left.
    """
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    path, part = "#", schema
    while True:
        for step, child in _children(part):
            is_referring = bool(shared) and '"$ref"' in json.dumps(child)
            tried = {**shared, **child} if is_referring else child
            if trials.is_at_fault(tried, is_lenient=is_lenient):
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
                    yield f"{name}/{escaped(key)}", child
    for name in LISTED_PARTS:
        value = schema.get(name)
        if isinstance(value, list):
            for index, child in enumerate(value):
                if isinstance(child, dict):
                    yield f"{name}/{index}", child
    for name in SINGLE_PARTS:
        value = schema.get(name)
        if isinstance(value, dict):
            yield name, value


def escaped(key: str) -> str:
    """Return a key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
