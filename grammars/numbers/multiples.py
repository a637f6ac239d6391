"""Multiples of a fraction, of which the compiler misses some that have fewer digits.

Under a `multipleOf` of 0.25 llguidance takes 0.50, and not 0.5. That 0.5 is a multiple of 0.5 too,
which it takes: so a multiple of the fraction with fewer digits is one of a larger fraction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MOST_WITH_ALL = 10
"""Largest fraction, its decimal point left out, of which the compiler takes all multiples."""
_MOST_READ = 2**32


def is_multiple(value: Decimal, multiple: Any) -> bool:
    """Return whether `value` is one of `multiple`; any value is one of what is none."""
    is_whole = isinstance(multiple, int) and not isinstance(multiple, bool)
    if not multiple or not (is_whole or (isinstance(multiple, float) and math.isfinite(multiple))):
        return True
    # Not as decimals, whose quotients have few digits.
    return (Fraction(value) / Fraction(str(multiple))).denominator == 1


def larger_fractions(multiple: Any) -> Iterator[float]:
    """Yield the fractions whose multiples are those of `multiple` with fewer digits."""
    if not isinstance(multiple, float) or not _is_read(multiple):
        return
    _, digits, exponent = Decimal(str(multiple)).normalize().as_tuple()
    assert isinstance(exponent, int)
    fraction = int("".join(map(str, digits)))
    for places in range(1, -exponent if fraction > _MOST_WITH_ALL else 0):
        larger = float(Decimal(math.lcm(fraction, 10 ** (-exponent - places))).scaleb(exponent))
        if _is_read(larger):
            yield larger


def _is_read(fraction: float) -> bool:
    """Return whether the compiler knows the digits of `fraction`, and does not refuse it.

    It multiplies by 10 until the product is whole, which that of 0.07 is not in time.
    """
    while 0 < fraction <= _MOST_READ and not fraction.is_integer():
        fraction *= 10
    return 0 < fraction <= _MOST_READ
