"""Clocks. Cores take the time as an argument `now_s`; the code around them reads a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back, from an arbitrary zero point."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The operating system's monotonic clock, which changes of the date do not move."""

    def now_s(self) -> float:
        return time.monotonic()


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
