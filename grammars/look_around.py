"""Patterns with look-around that writers of schemas write, and what they mean without it.

llguidance has no look-around. pydantic writes it for each `Decimal`, zod for each e-mail address.
"""

from __future__ import annotations

import re
from typing import Any

_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
_PLAIN_EMAIL = (
    r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:\\d\*\\\.\?(?:\\d\*|\\d\{0,(?P<places>\d{1,3})\}0\*)\$"
    r"|\(\?:\\d\{0,(?P<whole>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,(?P<all>\d{1,3})\}0\*\$\)"
    r"(?:\\d\*\\\.\\d\*|\\d\{0,(?P=whole)\}\\\.\\d\{0,(?P<both>\d{1,3})\})0\*\$\))"
)
"""What pydantic 2.12 and 2.13 write: without limits, with `places` behind the point, with at most
`whole` digits, or with `whole` before the point and `both` behind it. `all` counts the point."""
_MOST_DIGITS = 64
"""The most digits in all for which each place of the point gets a part of the pattern."""


def without_look_around(part: dict[str, Any]) -> None:
    """Put a pattern that llguidance takes in the place of a known one, in one part of a schema.

    pydantic forgets the end of a whole number, after which its pattern takes any text; here a
    number ends there.
    """
    pattern = part.get("pattern")
    if pattern == _EMAIL:
        part["pattern"] = _PLAIN_EMAIL
    elif isinstance(pattern, str) and (found := _DECIMAL.fullmatch(pattern)):
        places, whole, both, every = (
            None if one is None else int(one)
            for one in found.group("places", "whole", "both", "all")
        )
        if whole is None or every is None:
            part["pattern"] = _decimal([(None, places)])
        elif both is not None:
            part["pattern"] = _decimal([(whole, min(both, every - 1 - whole))])
        elif whole <= _MOST_DIGITS:
            part["pattern"] = _decimal([(most, whole - most) for most in range(whole + 1)])


def _decimal(limits: list[tuple[int | None, int | None]]) -> str:
    """Return the pattern of a number with at least one digit; zeros at its ends do not count.

    `limits`: the most digits before and behind the point that a number may have; None: any.
    """
    before = [_digits("0+", most, "0*") for most, _ in limits]
    points = [
        rf"{digits}\.{_any(most)}0*|\.{_digits('0+', most, '', '0*')}"
        for digits, (_, most) in zip(before, limits, strict=True)
    ]
    return f"^[+-]?(?:{'|'.join([before[-1], *points])})$"


def _any(most: int | None) -> str:
    return "[0-9]*" if most is None else f"[0-9]{{0,{most}}}"


def _digits(zeros: str, most: int | None, ahead: str, behind: str = "") -> str:
    """Return the pattern of at least one digit: of `zeros`, or of up to `most` between others."""
    if most is None:
        return "[0-9]+"
    return f"(?:{zeros}|{ahead}[0-9]{{1,{most}}}{behind})" if most else zeros
