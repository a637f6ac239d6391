"""Prometheus families of a node, made from numbers: `pdserve_` and a name, a text, samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import inf

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from common.observing.histogram import HistogramView


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(f"pdserve_{name}", text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with one label, its values in the given order."""
    family = GaugeMetricFamily(f"pdserve_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter without labels; `name` has no `_total`."""
    return CounterMetricFamily(f"pdserve_{name}", text, value=value)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with one label, ordered by its value."""
    return counters_by(name, text, (label,), (((key,), count) for key, count in values.items()))


def counters_by(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    """Return a counter with several labels, ordered by their values."""
    family = CounterMetricFamily(f"pdserve_{name}", text, labels=labels)
    for key, value in sorted(values):
        family.add_metric(key, value)
    return family


def histograms(name: str, text: str, label: str, views: Mapping[str, HistogramView]) -> Metric:
    """Return a histogram with one label, ordered by its value."""
    family = HistogramMetricFamily(f"pdserve_{name}", text, labels=[label])
    for key, view in sorted(views.items()):
        bounds = ["+Inf" if bound == inf else str(bound) for bound in (*view.bounds, inf)]
        buckets = list(zip(bounds, accumulate(view.counts), strict=True))
        family.add_metric([key], buckets, view.total)
    return family
