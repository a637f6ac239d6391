"""Dates of the calendar in JSON schemas.

llguidance takes `date` and `date-time` for their form alone: 0000-01-01 and 2023-02-29 have it. A
pattern beside the format leaves the dates of the Gregorian calendar (RFC 3339, section 5.7 and
appendix C) of the years 1 to 9999, as Python's `datetime.date` has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grammars.places import NAMED_PARTS

_FORMATS = frozenset({"date", "date-time"})
_DATA = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
"""Keywords whose values are no schemas."""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
"""Two digits that 4 divides, without 00."""
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"^(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
"""The pattern of a text that begins with a date."""


def with_calendar(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` with the pattern of dates wherever it has a format of dates.

    A part with a pattern of its own stays as it is: it has one pattern at most.
    """
    whole = dict(schema)
    left = [whole]
    while left:  # no recursion: the depth of a schema is checked elsewhere
        part = left.pop()
        form = part.get("format")
        if isinstance(form, str) and form in _FORMATS and "pattern" not in part:
            part["pattern"] = DATE
        left += _copied_parts(part)
    return whole


def _copied_parts(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Replace the parts of a schema by copies, and return these."""
    for key, value in part.items():
        if key in _DATA:
            continue
        if isinstance(value, dict):
            part[key] = copied = dict(value)
            if key not in NAMED_PARTS:
                yield copied
                continue
            for name, inner in copied.items():
                if isinstance(inner, dict):
                    copied[name] = child = dict(inner)
                    yield child
        elif isinstance(value, list):
            part[key] = listed = [dict(one) if isinstance(one, dict) else one for one in value]
            yield from (one for one in listed if isinstance(one, dict))
