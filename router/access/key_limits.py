"""Limits of one API key: requests a minute, and requests at once.

The rate is a token bucket that holds one minute's requests: a key that was idle may send them all
at once, and then one every 60 / `requests_per_minute` seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

BUSY_RETRY_S = 1
"""Retry time at the limit of concurrent requests, whose end is unknown, in seconds."""


_ROUNDING = 1e-9
"""A client that waited exactly as long as told must be admitted."""


class Limit(Enum):
    """The limit that a key reached."""

    RATE = "rate"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused request. `retry_after_s` is whole seconds, at least 1."""

    limit: Limit
    retry_after_s: int


class KeyLimits:
    """The state of one key; the times passed to it never decrease.

    `requests_per_minute` and `max_concurrent`: 0 means no limit.
    """

    def __init__(self, *, requests_per_minute: int, max_concurrent: int, now_s: float) -> None:
        self._requests_per_minute = requests_per_minute
        self._max_concurrent = max_concurrent
        self._tokens = float(requests_per_minute)
        self._filled_at_s = now_s
        self._num_running = 0

    @property
    def num_running(self) -> int:
        """Requests that were admitted and have not ended."""
        return self._num_running

    def change(self, *, requests_per_minute: int, max_concurrent: int, now_s: float) -> None:
        """Change the limits; used requests stay counted, running ones continue."""
        self._fill(now_s)
        used = self._requests_per_minute - self._tokens
        self._tokens = max(0.0, requests_per_minute - used)
        self._requests_per_minute = requests_per_minute
        self._max_concurrent = max_concurrent

    def refusal(self, now_s: float) -> Refusal | None:
        """Return why a request would be refused now; None: it would be admitted."""
        if self._max_concurrent and self._num_running >= self._max_concurrent:
            return Refusal(Limit.CONCURRENCY, BUSY_RETRY_S)
        if self._requests_per_minute:
            self._fill(now_s)
            if self._tokens < 1 - _ROUNDING:
                wait_s = (1 - self._tokens) * 60 / self._requests_per_minute
                return Refusal(Limit.RATE, max(1, math.ceil(wait_s)))
        return None

    def take(self, now_s: float) -> Refusal | None:
        """Admit a request, which must be ended by `release`; or return the refusal.

        A refusal uses up nothing.
        """
        refusal = self.refusal(now_s)
        if refusal is not None:
            return refusal
        if self._requests_per_minute:
            # Not below 0, or the next refusal would ask to wait a second more than it takes.
            self._tokens = max(0.0, self._tokens - 1)
        self._num_running += 1
        return None

    def release(self) -> None:
        """Record that an admitted request has ended, in whatever way."""
        assert self._num_running > 0
        self._num_running -= 1

    def _fill(self, now_s: float) -> None:
        rate_per_s = self._requests_per_minute / 60
        self._tokens = min(
            float(self._requests_per_minute),
            self._tokens + (now_s - self._filled_at_s) * rate_per_s,
        )
        self._filled_at_s = now_s
