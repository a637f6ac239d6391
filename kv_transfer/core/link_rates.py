"""How fast each link moves bytes, and when a transfer is so slow that it is better moved. Pure.

A transfer that waits for nothing but its bytes is given up when they would take much longer than
another decode node would need, with the prompt computed again. That is known only from the other
links: without one that was measured lately, no link is slow.

A fast link is often idle before anything can be measured, because its bytes leave as the prompt is
computed. There a whole transfer is the measure: the link is at least that fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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


def is_slow(
    remaining_bytes: int, own_per_s: float | None, others_per_s: Sequence[float], prefill_s: float
) -> bool:
    """Return whether these bytes take much longer than a new attempt elsewhere.

    `prefill_s` is how long the prompt took the first time.
    """
    usual_per_s = statistics.median(others_per_s) if others_per_s else 0.0
    if usual_per_s <= 0 or remaining_bytes <= 0:
        return False
    elsewhere_s = remaining_bytes / usual_per_s + prefill_s
    return remaining_bytes > (own_per_s or 0.0) * SLOW_FACTOR * elsewhere_s
