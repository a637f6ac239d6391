"""When a failure that is met again and again is worth a line in the log."""

from __future__ import annotations

from common.observing.clock import Clock

SECONDS_PER_WARNING = 60.0


class LastingFailure:
    """The first time, and once a minute while it lasts: its cause may be another one by then."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told_at_s = 0.0
        self.num = 0
        """How often in a row it was met."""

    def is_news(self) -> bool:
        """Count one more; return whether it is to be logged."""
        self.num += 1
        now_s = self._clock.now_s()
        if self.num > 1 and now_s - self._told_at_s < SECONDS_PER_WARNING:
            return False
        self._told_at_s = now_s
        return True

    def end(self) -> int:
        """Forget it, as it is over; return how often it was met."""
        num, self.num = self.num, 0
        return num
