"""Waiting for what other processes do: on the condition itself, never longer than a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_POLL_S = 0.01
_LONGEST_POLL_S = 0.1
_PAUSE = 3
"""Times of what a condition takes between two looks at it: one that asks processes would otherwise
take the cores from them, in a run of several processes from all others too."""

Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value], what: str, *, timeout_s: float = 30.0) -> Value:
    """The first true value of `condition`. Fails the test, saying `what`, when none comes."""
    ends_at_s = time.monotonic() + timeout_s
    while True:
        began_s = time.monotonic()
        value = condition()
        if value:
            return value
        now_s = time.monotonic()
        if now_s > ends_at_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what} (last: {value!r})")
        time.sleep(min(max(_PAUSE * (now_s - began_s), _POLL_S), _LONGEST_POLL_S))
