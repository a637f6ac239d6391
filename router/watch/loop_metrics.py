"""Metrics that the event loop alone writes, once for every token, and that a scrape reads there.

The client library's own take a lock for each number and look at every bucket in turn, which is many
times what it costs to count here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopCounter(Collector):
    """A count that only rises; `name` without its `_total`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self.value = 0
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """The count, as of now."""
        yield CounterMetricFamily(self._name, self._text, self.value)


class Observations:
    """One series of a histogram: how many observations each bucket holds alone, and their sum."""

    __slots__ = ("_bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, span_s: float) -> None:
        """One observation; a bucket holds what is not above its bound."""
        self.counts[bisect_left(self._bounds_s, span_s)] += 1
        self.sum_s += span_s


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
        self.of = {value: Observations(bounds_s) for value in values}
        self.observe = self.of[values[0]].observe
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """The buckets, as of now."""
        family = HistogramMetricFamily(
            self._name, self._text, labels=[self._label] if self._label else []
        )
        for value, series in self.of.items():
            buckets = list(zip(self._bounds, accumulate(series.counts), strict=True))
            family.add_metric([value] if self._label else [], buckets, series.sum_s)
        yield family
