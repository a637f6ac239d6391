"""Phases with their own time limits, of which one that fails does not stop the rest."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class OutOfTime(Exception):
    """A phase took longer than it may."""


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread, whatever it waits for, after `limit_s`."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"not within {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, limit_s))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Phases:
    """Runs phases one after the other, and prints a line as each ends."""

    def __init__(self, total_s: float, on_end: Callable[[], None]) -> None:
        self._ends_at_s = time.monotonic() + total_s
        self._on_end = on_end
        self.passed = 0
        self.failed: list[str] = []

    def run(
        self,
        name: str,
        limit_s: float,
        work: Callable[[], dict[str, Any] | None],
        *,
        is_closing: bool = False,
    ) -> bool:
        """Run one within its limit and what is left of the whole; return whether it passed.

        One that closes has its limit however late it is.
        """
        begun_s = time.monotonic()
        found: dict[str, Any] | None = None
        try:
            left_s = limit_s if is_closing else self._ends_at_s - begun_s
            with limited(min(limit_s, left_s)):
                found = work()
            self.passed += 1
            result = "ok"
        except Exception:  # whatever it was: the other phases go on
            self.failed.append(name)
            result = f"FAILED\n{traceback.format_exc()}"
        took_s = time.monotonic() - begun_s
        print(f"== {name}: {result} ({took_s:.1f} s) {found or ''}".rstrip(), flush=True)
        self._on_end()
        return result == "ok"
