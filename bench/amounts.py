"""Numbers of a benchmark's command line that are amounts: none of them can be nothing."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError


def above_0(text: str) -> float:
    """Return a finite number above 0. Raises `ArgumentTypeError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r}: wanted a number above 0")
    return value


def at_least_1(text: str) -> int:
    """Return a whole number above 0. Raises `ArgumentTypeError`."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"{text!r}: wanted a whole number, 1 or more")
    return int(text)
