"""Waiting for what other processes do: on the condition itself, never longer than a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_POLL_S = 0.01
_PAUSES = 3
"""How many times as long as a condition took is waited before it is asked again: what it asks needs
the cores for what is waited for."""
_LONGEST_POLL_S = 0.25

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
        time.sleep(min(max(_POLL_S, _PAUSES * (now_s - began_s)), _LONGEST_POLL_S))
