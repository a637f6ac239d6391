"""Requests refused for their API key: counted by reason, logged in one line per 10 s at most."""

from __future__ import annotations

import logging
from enum import Enum

from prometheus_client import CollectorRegistry, Counter
from starlette.types import Scope

from common.observing.clock import Clock
from router.access.spaced_lines import SpacedLines, client_address

logger = logging.getLogger("pdserve.router.keys")


class LoginRefusal(Enum):
    """Why a request was refused."""

    NO_KEY = "no_key"
    WRONG_KEY = "wrong_key"
    NOT_ADMIN = "not_admin"


class RefusedLogins:
    """Counts refusals. A line names the address of the latest one, and how many there were.

    The lines are spaced, so that a client that guesses keys cannot fill the log.
    """

    def __init__(self, clock: Clock, registry: CollectorRegistry) -> None:
        counter = Counter(
            "pdserve_refused_logins_total",
            "Requests refused for their API key: no_key, wrong_key or not_admin",
            ["reason"],
            registry=registry,
        )
        self._counters = {reason: counter.labels(reason.value) for reason in LoginRefusal}
        self._lines = SpacedLines(clock)

    def on_refused(self, reason: LoginRefusal, scope: Scope, key_name: str = "") -> None:
        """Count a refusal. `key_name` is that of a valid key without the permission."""
        self._counters[reason].inc()
        num = self._lines.num_to_tell()
        if not num:
            return
        what = {
            LoginRefusal.NO_KEY: "no API key",
            LoginRefusal.WRONG_KEY: "a wrong API key",
            LoginRefusal.NOT_ADMIN: f"the key {key_name!r}, which is not an administrator's",
        }
        logger.warning(
            "%d requests refused for their API key since the last line; the latest came from %s "
            "with %s",
            *(num, client_address(scope), what[reason]),
        )
