"""Metrics of the event loop's own: what a scrape shows is what the client library would show."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.watch.loop_metrics import LoopCounter, LoopHistogram

BOUNDS_S = (0.001, 0.01, 0.5, 2.0)
spans_s = st.lists(st.sampled_from(BOUNDS_S) | st.floats(0, 10), max_size=30)


def shown(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(spans_s)
def test_a_histogram_shows_what_the_librarys_shows(observed_s: Sequence[float]) -> None:
    own, librarys = CollectorRegistry(), CollectorRegistry()
    histogram = LoopHistogram("x_seconds", "What it is", BOUNDS_S, own)
    same = Histogram("x_seconds", "What it is", buckets=BOUNDS_S, registry=librarys)
    for span_s in observed_s:
        histogram.observe(span_s)
        same.observe(span_s)
    assert shown(own) == shown(librarys)


@given(spans_s, spans_s)
def test_so_does_one_with_a_label(first_s: Sequence[float], second_s: Sequence[float]) -> None:
    own, librarys = CollectorRegistry(), CollectorRegistry()
    histogram = LoopHistogram(
        "x_seconds", "What it is", BOUNDS_S, own, label="stage", values=["a", "b"]
    )
    same = Histogram("x_seconds", "What it is", ["stage"], buckets=BOUNDS_S, registry=librarys)
    for value, observed_s in (("a", first_s), ("b", second_s)):
        child = same.labels(value)
        for span_s in observed_s:
            histogram.of[value].observe(span_s)
            child.observe(span_s)
    assert shown(own) == shown(librarys)


def test_a_counter_shows_what_the_librarys_shows() -> None:
    own, librarys = CollectorRegistry(), CollectorRegistry()
    counter = LoopCounter("x_tokens", "What it is", own)
    counter.value += 7
    Counter("x_tokens_total", "What it is", registry=librarys).inc(7)
    assert shown(own) == shown(librarys)
