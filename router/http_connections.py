"""How many connections the router's port takes, how long they may take, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter

from http_serving.bounded_connections import ConnectionLimits, Refused

# A body of 10 MiB within a minute is 1.4 Mbit/s. Pools of clients and balancers keep a connection
# for a minute at most as a rule, so it is they that end it, and no request meets a closing one.
LIMITS = ConnectionLimits(max_connections=4096, request_timeout_s=60.0, idle_timeout_s=75.0)


def router_limits(max_connections: int) -> ConnectionLimits:
    """The port's bounds."""
    return replace(LIMITS, max_connections=max_connections)


def count_refused(registry: CollectorRegistry) -> Callable[[Refused], None]:
    """Counts connections that were closed without an answer, in a metric of `registry`."""
    counter = Counter(
        "pdserve_refused_connections_total",
        "HTTP connections closed unanswered: too_many, too_slow, head_too_large, malformed",
        ["reason"],
        registry=registry,
    )
    of_reason = {reason: counter.labels(reason.value) for reason in Refused}
    return lambda reason: of_reason[reason].inc()
