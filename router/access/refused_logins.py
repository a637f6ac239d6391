"""Requests refused for their API key: counted by reason, logged in one line per 10 s at most."""

from __future__ import annotations

import logging
from enum import Enum

from prometheus_client import CollectorRegistry, Counter
from starlette.types import Scope

from common.clock import Clock

logger = logging.getLogger("pdserve.router.keys")

LINE_EVERY_S = 10.0


class LoginRefusal(Enum):
    """Why a request was refused."""

    NO_KEY = "no_key"
    WRONG_KEY = "wrong_key"
    NOT_ADMIN = "not_admin"


class RefusedLogins:
    """Counts refusals. A line names the address of the latest one, and how many there were.

    Refusals within `LINE_EVERY_S` of a line are told with the next refusal after it, so that a
    client that guesses keys cannot fill the log.
    """

    def __init__(self, clock: Clock, registry: CollectorRegistry) -> None:
        counter = Counter(
            "pdserve_refused_logins_total",
            "Requests refused for their API key: no_key, wrong_key or not_admin",
            ["reason"],
            registry=registry,
        )
        self._counters = {reason: counter.labels(reason.value) for reason in LoginRefusal}
        self._clock = clock
        self._told_at_s = -LINE_EVERY_S
        self._num_untold = 0

    def on_refused(self, reason: LoginRefusal, scope: Scope, key_name: str = "") -> None:
        """Count a refusal. `key_name` is that of a valid key without the permission."""
        self._counters[reason].inc()
        self._num_untold += 1
        now_s = self._clock.now_s()
        if now_s - self._told_at_s < LINE_EVERY_S:
            return
        what = {
            LoginRefusal.NO_KEY: "no API key",
            LoginRefusal.WRONG_KEY: "a wrong API key",
            LoginRefusal.NOT_ADMIN: f"the key {key_name!r}, which is not an administrator's",
        }
        logger.warning(
            "%d requests refused for their API key since the last line; the latest came from %s "
            "with %s",
            *(self._num_untold, client_address(scope), what[reason]),
        )
        self._told_at_s, self._num_untold = now_s, 0


def client_address(scope: Scope) -> str:
    """Return the address of the peer: a client's, or a balancer's."""
    client = scope.get("client")
    return str(client[0]) if client else "an unknown address"
