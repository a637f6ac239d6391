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
