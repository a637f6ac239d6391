"""Metrics of each API key, by its name: as many series as the file has keys, which is bounded."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.access.api_key_book import ApiKeyBook
from router.access.key_limits import Limit

_OUTCOMES = {Limit.RATE: "rate_limited", Limit.CONCURRENCY: "concurrency_limited"}


class ApiKeyCollector(Collector):
    """Reads the keys at each scrape, so a revoked key's series end with it."""

    def __init__(self, book: ApiKeyBook) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "pdserve_api_key_requests_total",
            "Generation requests by API key: accepted, rate_limited or concurrency_limited",
            labels=["key", "outcome"],
        )
        running = GaugeMetricFamily(
            "pdserve_api_key_requests_in_progress",
            "Generation requests now in progress, by API key",
            labels=["key"],
        )
        for used in self._book.in_use():
            name = used.key.name
            requests.add_metric([name, "accepted"], used.num_accepted)
            for limit, outcome in _OUTCOMES.items():
                requests.add_metric([name, outcome], used.num_refused[limit])
            running.add_metric([name], used.limits.num_running)
        yield requests
        yield running
