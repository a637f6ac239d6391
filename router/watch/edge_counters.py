"""What the HTTP edge counts for the live page, beside its Prometheus metrics.

Kept apart from them because a page wants percentiles of the last seconds, and a Prometheus
histogram holds neither the seconds nor the percentiles.
"""

from __future__ import annotations

from router.watch.latency_window import LatencyWindow

LATENCY_INTERVALS = 10
"""One a second: percentiles of a single second would be those of a handful of requests."""


class EdgeCounters:
    """Written by the edge as it goes, read once a second. Counts only rise."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_requests = 0
        self.num_failed = 0
        self.ttft = LatencyWindow(LATENCY_INTERVALS)
        self.tpot = LatencyWindow(LATENCY_INTERVALS)

    def on_request_end(self, *, has_failed: bool) -> None:
        """A request was answered, given up by its client, or failed."""
        self.num_requests += 1
        self.num_failed += has_failed

    def end_interval(self) -> None:
        """A second is over."""
        self.ttft.end_interval()
        self.tpot.end_interval()
