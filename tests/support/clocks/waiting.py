"""Waiting for what other processes do: on the condition itself, never longer than a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_POLL_S = 0.01

Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value], what: str, *, timeout_s: float = 30.0) -> Value:
    """The first true value of `condition`. Fails the test, saying `what`, when none comes."""
    ends_at_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > ends_at_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what} (last: {value!r})")
        time.sleep(_POLL_S)
