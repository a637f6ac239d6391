"""How fast each link moves bytes, and when a transfer is so slow that it is better moved. Pure.

A transfer that waits for nothing but its bytes is given up when they would take much longer than
another decode node would need, with the prompt computed again. That is known only from the other
links: without one that was measured lately, no link is slow.

A fast link is often idle before anything can be measured, because its bytes leave as the prompt is
computed. There a whole transfer is the measure: the link is at least that fast.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Hashable, Mapping

MIN_SPAN_S = 0.02
"""Shorter measurements say more about scheduling than about the network."""
WINDOW_S = 2.0
"""What lies further back counts less."""
REMEMBERED_S = 60.0
SLOW_FOR_S = 2.0
"""How long a transfer waits for its bytes alone before it can be slow."""
SLOW_FACTOR = 4.0
SLOW_LOOK_S = 0.5
"""How often transfers that wait are looked at."""


class RateMeter:
    """Bytes per second of one link while something is in flight, by acknowledgements."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._num_bytes = 0.0
        self._last_per_s: float | None = None
        self._last_at_s = 0.0

    def on_acknowledged(self, num_bytes: int, now_s: float, *, is_idle: bool) -> None:
        """Record acknowledged bytes; `is_idle`: nothing is in flight any more."""
        if self._since_s is None:
            # When these bytes began to move is unknown.
            self._since_s = now_s
        else:
            self._num_bytes += num_bytes
            self._measure(now_s)
        if is_idle:
            self.on_idle()

    def on_idle(self) -> None:
        """Record that nothing is in flight: the time until the next bytes does not count."""
        self._since_s, self._num_bytes = None, 0.0

    def on_suspended(self, span_s: float, now_s: float) -> None:
        """Leave out `span_s` until now, in which this process stood still."""
        if self._since_s is not None:
            self._since_s = min(now_s, self._since_s + span_s)

    def on_committed(self, num_bytes: int, span_s: float, now_s: float) -> None:
        """Record a whole transfer, which took `span_s` with its prompt: the least that it does."""
        least_per_s = num_bytes / max(span_s, MIN_SPAN_S)
        if least_per_s > (self.latest(now_s) or 0.0):
            self._last_per_s, self._last_at_s = least_per_s, now_s

    def present(self, now_s: float) -> float | None:
        """Return the rate in bytes/s up to now; None before anything was acknowledged."""
        if self._since_s is None:
            return None
        return self._num_bytes / max(now_s - self._since_s, MIN_SPAN_S)

    def measured(self, now_s: float) -> float | None:
        """Return the rate while bytes are in flight; None when idle, or not for long enough."""
        if self._since_s is None or now_s - self._since_s < MIN_SPAN_S:
            return None
        return self.present(now_s)

    def latest(self, now_s: float) -> float | None:
        """Return the last measured rate in bytes/s, unless it is old."""
        return self._last_per_s if now_s - self._last_at_s <= REMEMBERED_S else None

    def _measure(self, now_s: float) -> None:
        assert self._since_s is not None
        span_s = now_s - self._since_s
        if span_s >= MIN_SPAN_S:
            self._last_per_s, self._last_at_s = self._num_bytes / span_s, now_s
        if span_s > WINDOW_S:
            self._num_bytes /= 2
            self._since_s = now_s - span_s / 2


class UsualRates:
    """What links usually carry, from one look at all of them each `SLOW_LOOK_S`.

    A link that is idle now was perhaps measured while all others were idle too. Where many links
    are busy, they share this node's network: an idle one would get no more than an equal part of
    the most that one link alone carried.
    """

    def __init__(self) -> None:
        self._looked_at_s = -math.inf
        self._per_s: list[float] = []
        self._of_link: dict[Hashable, float] = {}

    def beside(
        self, link: Hashable, meters: Mapping[Hashable, RateMeter], now_s: float
    ) -> float | None:
        """Return the median rate of all links but this one, in bytes/s; None if none has one."""
        if now_s >= self._looked_at_s + SLOW_LOOK_S:
            self._looked_at_s = now_s
            self._look(meters, now_s)
        rates, own_per_s = self._per_s, self._of_link.get(link)
        own_at = len(rates) if own_per_s is None else bisect_left(rates, own_per_s)
        count = len(rates) - (own_per_s is not None)
        middle = {(count - 1) // 2, count // 2} if count else set()
        return statistics.mean(rates[at + (at >= own_at)] for at in middle) if middle else None

    def _look(self, meters: Mapping[Hashable, RateMeter], now_s: float) -> None:
        busy = {one: meter.measured(now_s) for one, meter in meters.items()}
        latest = {one: meter.latest(now_s) for one, meter in meters.items()}
        most_per_s = max((rate for rate in latest.values() if rate is not None), default=0.0)
        share_per_s = most_per_s / max(1, sum(rate is not None for rate in busy.values()))
        self._of_link = {}
        for one, measured_per_s in busy.items():
            remembered_per_s = latest[one]
            if measured_per_s is not None:
                self._of_link[one] = measured_per_s
            elif remembered_per_s is not None:
                self._of_link[one] = min(remembered_per_s, share_per_s)
        self._per_s = sorted(self._of_link.values())


def is_slow(
    remaining_bytes: int, own_per_s: float | None, usual_per_s: float | None, prefill_s: float
) -> bool:
    """Return whether these bytes take much longer than a new attempt elsewhere.

    `usual_per_s` is the rate of other links; `prefill_s` is how long the prompt took the first
    time.
    """
    if not usual_per_s or remaining_bytes <= 0:
        return False
    elsewhere_s = remaining_bytes / usual_per_s + prefill_s
    return remaining_bytes > (own_per_s or 0.0) * SLOW_FACTOR * elsewhere_s
