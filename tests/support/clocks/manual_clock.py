"""A clock for tests, which moves only when it is told to."""

from __future__ import annotations


class ManualClock:
    """A clock that a test moves by hand."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Move forward by `by_s` seconds. Raises `ValueError` when `by_s` is negative."""
        if by_s < 0:
            raise ValueError(f"a monotonic clock cannot go back by {by_s} s")
        self._now_s += by_s
