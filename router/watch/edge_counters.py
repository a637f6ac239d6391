"""The HTTP edge's counts for the live page, besides its Prometheus metrics.

They are separate because a page shows percentiles of the last seconds, and a Prometheus histogram
contains neither the seconds nor the percentiles.
"""

from __future__ import annotations

from router.watch.latency_window import LatencyWindow

LATENCY_INTERVALS = 10
"""One interval a second: a single second has only a few requests, too few for percentiles."""


class EdgeCounters:
    """Written by the edge with each request, read once a second. Counts only rise."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_requests = 0
        self.num_failed = 0
        self.ttft = LatencyWindow(LATENCY_INTERVALS)
        self.tpot = LatencyWindow(LATENCY_INTERVALS)

    def on_request_end(self, *, has_failed: bool) -> None:
        """Count a request that was answered, aborted by its client, or failed."""
        self.num_requests += 1
        self.num_failed += has_failed

    def end_interval(self) -> None:
        """End the present interval of one second."""
        self.ttft.end_interval()
        self.tpot.end_interval()
