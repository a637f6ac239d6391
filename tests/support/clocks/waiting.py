"""Waiting for what other processes do: on the condition itself, never longer than a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_POLL_S, _LONGEST_POLL_S = 0.01, 0.25
_PAUSES = 6
"""Pauses are so many times as long as a look, which takes the cores from what is waited for."""

Value = TypeVar("Value")


def pause_s(took_s: float) -> float:
    """How long to wait before the next look, after one that took so long."""
    return min(max(_POLL_S, _PAUSES * took_s), _LONGEST_POLL_S)


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
        time.sleep(pause_s(now_s - began_s))
