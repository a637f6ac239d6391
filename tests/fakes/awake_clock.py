"""A clock for tests of silence: what the machine does not run for, it does not count."""

from __future__ import annotations

import threading
import time


class AwakeClock:
    """Real time, but between two readings it goes on by `most_s` at most.

    Whoever waits reads it once in `most_s` or more often. Where this process stalls for longer,
    nobody in it was silent meanwhile.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._lock = threading.Lock()
        self._read_at_s = time.monotonic()
        self._now_s = 0.0

    def now_s(self) -> float:
        with self._lock:
            read_at_s = time.monotonic()
            self._now_s += min(self._most_s, read_at_s - self._read_at_s)
            self._read_at_s = read_at_s
            return self._now_s
