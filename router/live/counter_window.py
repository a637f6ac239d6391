"""Recent rates of counters. Has no clock: times are arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping


class CounterWindow:
    """The increases in the last `num_intervals` intervals, by the counters' keys.

    A new counter counts from its first value; one that fell has restarted at 0. A key that is not
    given is dropped, so the given keys bound the memory.
    """

    def __init__(self, num_intervals: int) -> None:
        self._intervals: deque[tuple[float, dict[Hashable, int]]] = deque(maxlen=num_intervals)
        self._values: Mapping[Hashable, int] = {}
        self._at_s: float | None = None

    def push(self, values: Mapping[Hashable, int], now_s: float) -> None:
        """Add the present values of the counters. Keeps `values`."""
        if self._at_s is not None:
            rises: dict[Hashable, int] = {}
            for key, value in values.items():
                before = self._values.get(key, value)
                rise = value - before if value >= before else value
                if rise:
                    rises[key] = rise
            self._intervals.append((now_s - self._at_s, rises))
        self._values, self._at_s = values, now_s

    def rise(self, key: Hashable) -> int:
        """Return the increase of the counter within the window."""
        return sum(rises.get(key, 0) for _, rises in self._intervals)

    def per_s(self, key: Hashable) -> float:
        """Return the increase per second; 0 without two values."""
        span_s = sum(span for span, _ in self._intervals)
        return self.rise(key) / span_s if span_s > 0 else 0.0
