"""Percentiles of recent observations, in bounded memory at any rate.

Times fall into buckets, each 5 % wider than the one before, so a percentile is off by 2.5 % at
most. Each interval has its own buckets and leaves the window as a whole.
"""

from __future__ import annotations

import math
from collections import Counter, deque

_LOG_WIDTH = math.log(1.05)
_SHORTEST_S, _LONGEST_S = 1e-6, 1e6


class LatencyWindow:
    """The observations of the present interval and of the `num_intervals` - 1 before it."""

    def __init__(self, num_intervals: int) -> None:
        self._intervals: deque[Counter[int]] = deque([Counter()], maxlen=num_intervals)
        self._now = self._intervals[-1]

    def observe(self, span_s: float) -> None:
        """Add one observation, in seconds."""
        bounded_s = min(max(span_s, _SHORTEST_S), _LONGEST_S)
        self._now[math.floor(math.log(bounded_s) / _LOG_WIDTH)] += 1

    def add(self, other: LatencyWindow) -> None:
        """Add the observations of another one's present interval."""
        self._now.update(other._now)

    def end_interval(self) -> None:
        """Begin a new interval."""
        self._now = Counter()
        self._intervals.append(self._now)

    def percentiles_s(self, *shares: float) -> list[float | None]:
        """Return the time that each share (0 to 1) of the observations does not exceed.

        In seconds, to within 2.5 %; None without observations.
        """
        counts: Counter[int] = sum(self._intervals, Counter())
        ranks = [max(1, math.ceil(share * counts.total())) for share in shares]
        return [_at_rank(counts, rank) for rank in ranks]


def _at_rank(counts: Counter[int], rank: int) -> float | None:
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return math.exp((bucket + 0.5) * _LOG_WIDTH)
    return None
