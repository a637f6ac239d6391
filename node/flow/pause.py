"""A time in which something that failed is left alone. Pure: time comes in as arguments."""

from __future__ import annotations

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 120.0
"""Twice as long after each failure that follows another one, as long as what was mended may stay
unused. A failure in vain costs one request the time for which it waits, as long as computing."""


class Pause:
    """A time in which something that failed is left alone."""

    def __init__(self) -> None:
        self.until_s = 0.0
        self._length_s = 0.0

    def is_on(self, now_s: float) -> bool:
        """Return whether the pause lasts."""
        return now_s < self.until_s

    def on_good(self) -> None:
        """Record a success: the next pause is the shortest."""
        self.until_s = self._length_s = 0.0

    def on_failed(self, now_s: float) -> None:
        """Begin a pause, unless one is on: what fails then had begun before it."""
        if self.is_on(now_s):
            return
        self._length_s = min(max(2 * self._length_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self.until_s = now_s + self._length_s
