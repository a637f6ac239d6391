"""Tells a turn in which a node stood still from one that is long, by how long turns are. Pure.

A process that was suspended, a machine that slept and a step that hung once are no measure of how
fast a node is: what is measured over such a turn counts it as the longest that may be usual.
"""

from __future__ import annotations

from collections import deque

LEAST_LIMIT_S = 1.0
"""No shorter turn is taken for a standstill: it changes little."""
TIMES_USUAL = 10.0
"""Multiple of the usual turn beyond which a node stood still."""
_NEWEST = 0.25
"""Weight of the latest turn. One that is cut counts too, so that turns may become long for good."""
_MOST_KEPT = 16
"""Standstills that are kept: what was measured over more counts the earlier ones."""


class Standstills:
    """The latest standstills of a node. One thread uses it."""

    def __init__(self) -> None:
        self._usual_s = 0.0
        self._seen_at_s: float | None = None
        self._kept: deque[tuple[float, float]] = deque(maxlen=_MOST_KEPT)
        """The end of each standstill, and the seconds of it that are left out."""

    def is_in(self, step_s: float, expected_s: float) -> bool:
        """Return whether the node stood still in a step: it took far longer than usual turns, and
        than the `expected_s` that its tokens take, as a rare long prompt does not."""
        return step_s > max(self._limit_s, TIMES_USUAL * expected_s)

    @property
    def _limit_s(self) -> float:
        return max(LEAST_LIMIT_S, TIMES_USUAL * self._usual_s)

    def look(self, now_s: float, *, is_busy: bool) -> None:
        """Take the end of a turn, and of an idle time; `is_busy`: another turn begins at once."""
        if self._seen_at_s is not None and now_s > self._seen_at_s:
            span_s = now_s - self._seen_at_s
            counted_s = min(span_s, self._limit_s)
            if counted_s < span_s:
                self._kept.append((now_s, span_s - counted_s))
            self._usual_s += _NEWEST * (counted_s - self._usual_s)
        self._seen_at_s = now_s if is_busy else None

    def span_s(self, since_s: float, now_s: float) -> float:
        """Return the seconds from `since_s` to `now_s`, the last look, without standstills."""
        stood_s = (min(span_s, at_s - since_s) for at_s, span_s in self._kept if at_s > since_s)
        return now_s - since_s - sum(stood_s)
