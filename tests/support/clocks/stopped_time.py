"""An event loop's time that a test moves, for whatever sets timers: no test waits, none is late."""

from __future__ import annotations

import asyncio
import time


class StoppedTime:
    """Time stands still on the running loop, and for whom this is a `Clock`, until it is moved.

    A machine that stalls changes nothing then. Timers are due in `advance`; a time-out that guards
    a test against waiting for ever is one more timer, and pytest's own is what is left of it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = float(round(self._loop.time()))
        """A whole number, so that spans come out exactly."""
        self._loop.time = self.now_s  # type: ignore[method-assign]

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Move on by `by_s` seconds; what is due runs when the caller waits next."""
        assert by_s >= 0, f"time cannot go back by {by_s} s"
        self._now_s += by_s

    def go_on(self) -> None:
        """Time passes again, from where it stands."""
        ahead_s = self._now_s - time.monotonic()
        self._loop.time = lambda: time.monotonic() + ahead_s  # type: ignore[method-assign]
