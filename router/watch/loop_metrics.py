"""Metrics with a value for every token, written and read on the event loop.

The metrics of the client library take a lock for each value and compare it with every bucket in
turn, at many times the cost of counting here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.observing.histogram import Histogram


class LoopCounter(Collector):
    """A counter; `name` has no `_total`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self.value = 0
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the count as of now."""
        yield CounterMetricFamily(self._name, self._text, self.value)


class LoopHistogram(Collector):
    """A histogram; with a label it has a series for each of `values`, from the start."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds_s: Sequence[float],
        registry: CollectorRegistry,
        *,
        label: str = "",
        values: Sequence[str] = ("",),
    ) -> None:
        self._name = name
        self._text = text
        self._bounds: list[str] = [
            floatToGoString(bound)  # type: ignore[no-untyped-call]
            for bound in (*bounds_s, inf)
        ]
        self._label = label
        self.of = {value: Histogram(bounds_s) for value in values}
        self.observe = self.of[values[0]].observe
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the buckets as of now."""
        family = HistogramMetricFamily(
            self._name, self._text, labels=[self._label] if self._label else []
        )
        for value, series in self.of.items():
            view = series.view()
            buckets = list(zip(self._bounds, accumulate(view.counts), strict=True))
            family.add_metric([value] if self._label else [], buckets, view.total)
        yield family
