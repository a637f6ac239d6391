"""Dates of the calendar in JSON schemas.

llguidance takes `date` and `date-time` for their form alone: 0000-01-01 and 2023-02-29 have it. A
pattern beside the format leaves the dates of the Gregorian calendar (RFC 3339, section 5.7 and
appendix C) of the years 1 to 9999, as Python's `datetime.date` has them.
"""

from __future__ import annotations

from typing import Any

_FORMATS = frozenset({"date", "date-time"})

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


def add_calendar(part: dict[str, Any]) -> None:
    """Add the pattern of dates to one part of a schema, where that has a format of dates.

    A part with a pattern of its own stays as it is: it has one pattern at most.
    """
    form = part.get("format")
    if isinstance(form, str) and form in _FORMATS and "pattern" not in part:
        part["pattern"] = DATE
