"""Counts of values by size, cheap enough for every token. One thread writes, any may read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class HistogramView:
    """A histogram at one moment.

    `counts[i]` values were at most `bounds[i]` and above the bound before; the last count has no
    bound. `total` is the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts values by upper bounds, which are inclusive and rise."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Start with no values. Raises `ValueError` unless there is a bound and the bounds rise."""
        self._bounds = tuple(bounds)
        if not self._bounds or any(b <= a for a, b in pairwise(self._bounds)):
            raise ValueError(f"bounds are {self._bounds}: wanted at least one, rising")
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def view(self) -> HistogramView:
        """Return the counts so far."""
        return HistogramView(self._bounds, tuple(self._counts), self._total)
