"""A clock for tests of time-outs that does not count stalls of the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

LOOK_S, LONGEST_LOOK_S = 0.05, 0.5

Outcome = TypeVar("Outcome")


class StallFreeClock:
    """Real time that advances by `most_s` at most between two readings.

    Code that waits reads it at least once in `most_s`. A longer gap is a stall of this process, and
    a stall says nothing about its peers.
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


def timed(call: Callable[[], Outcome]) -> tuple[Outcome, float]:
    """Return what a call returns, and the seconds that it took without stalls of this process."""
    clock = StallFreeClock(LONGEST_LOOK_S)
    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(call)
        while wait([calling], timeout=LOOK_S).not_done:
            clock.now_s()
    return calling.result(), clock.now_s()
