"""The HTTP edge's counts for the live page, besides its Prometheus metrics.

They are separate because a page shows percentiles of the last seconds, and a Prometheus histogram
contains neither the seconds nor the percentiles.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from router.watch.latency_window import LatencyWindow

LATENCY_INTERVALS = 10
"""One interval a second: a single second has only a few requests, too few for percentiles."""


NUM_RECENT_ERRORS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """The error that ended a request. `text` is empty where it may quote the conversation."""

    at_s: float
    endpoint: str
    request_id: str
    status: int
    code: str
    text: str

    @property
    def is_failure(self) -> bool:
        """Whether the server failed, and did not refuse what a client asked or how often."""
        return self.status >= 500


class EdgeCounters:
    """Written by the edge with each request, read once a second. Counts only rise."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_requests = 0
        self.num_failed = 0
        self.num_refused = 0
        self.errors: deque[RequestError] = deque(maxlen=NUM_RECENT_ERRORS)
        self.ttft = LatencyWindow(LATENCY_INTERVALS)
        self.tpot = LatencyWindow(LATENCY_INTERVALS)

    def on_request_end(self, error: RequestError | None = None) -> None:
        """Count a request that was answered, aborted by its client, or ended by `error`."""
        self.num_requests += 1
        if error is not None:
            self.num_failed += error.is_failure
            self.num_refused += not error.is_failure
            self.errors.append(error)

    def end_interval(self) -> None:
        """End the present interval of one second."""
        self.ttft.end_interval()
        self.tpot.end_interval()
