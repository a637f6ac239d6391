"""When a failure that is met again and again is worth a line in the log."""

from __future__ import annotations

from common.observing.clock import Clock

SECONDS_PER_WARNING = 60.0


class LastingFailure:
    """Says of each failure in a row whether it is logged: the first one is, and one a minute.

    Later ones are logged too because the cause may be another one by then.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told_at_s = 0.0
        self.num = 0
        """Failures in a row so far."""

    def is_news(self) -> bool:
        """Count a failure; return whether it is to be logged."""
        self.num += 1
        now_s = self._clock.now_s()
        if self.num > 1 and now_s - self._told_at_s < SECONDS_PER_WARNING:
            return False
        self._told_at_s = now_s
        return True

    def end(self) -> int:
        """Begin anew after a success; return how many failures in a row came before it."""
        num, self.num = self.num, 0
        return num
