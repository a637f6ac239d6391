"""The texts around the names and values of arguments, and the texts of values."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_INTEGER = "-?(?:0|[1-9][0-9]*)"
_SCALARS = (
    ("null", "null"),
    ("boolean", "true|false"),
    ("number", rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"),
)
SCALARS = frozenset(kind for kind, _ in _SCALARS)
"""The kinds of scalars that are no texts."""
_BEGUN_NUMBER = re.compile(
    r"-?(?:0|[1-9][0-9]*)?(?:(?<=[0-9])\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """`before_key`, a name, `after_key`, a value, `end` and `after_end` are one argument.

    No value but that of a list or an object has the text `end` in it.
    """

    before_key: str
    after_key: str
    end: str
    after_end: str

    def text_of(self, arguments_json: str) -> str:
        """Return the text of arguments, which are the JSON of an object."""
        arguments: dict[str, Any] = json.loads(arguments_json)
        return "".join(
            f"{self.before_key}{name}{self.after_key}{value_text(value)}{self.end}{self.after_end}"
            for name, value in arguments.items()
        )


def value_text(value: Any) -> str:
    """Return the text of a value."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def scalar_pattern(kinds: Collection[str]) -> str:
    """Return the pattern of the texts that are JSON of a scalar of one of `kinds`; '': none."""
    return "|".join(scalar_patterns(kinds, has_fractions=True))


def scalar_patterns(kinds: Collection[str], *, has_fractions: bool) -> list[str]:
    """Return the patterns of the JSON of a scalar of one of `kinds`, where numbers need not be
    integers or must be."""
    found = [pattern for kind, pattern in _SCALARS if kind in kinds and kind != "number"]
    if "number" in kinds:
        found.append(dict(_SCALARS)["number"] if has_fractions else _INTEGER)
    return found


def may_become_scalar(text: str, kinds: Collection[str]) -> bool:
    """Return whether `text` begins, or is, the JSON of a scalar of one of `kinds`."""
    words = [
        word
        for kind, word in (("null", "null"), ("boolean", "true"), ("boolean", "false"))
        if kind in kinds
    ]
    if any(word.startswith(text) for word in words):
        return True
    return "number" in kinds and _BEGUN_NUMBER.fullmatch(text) is not None


def container_brackets(kinds: Collection[str]) -> str:
    """Return the brackets with which values of `kinds` begin: a text beside them has another
    beginning."""
    return "".join(bracket for kind, bracket in (("object", "{"), ("array", "[")) if kind in kinds)
