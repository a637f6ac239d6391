"""`docs/metrics.md` is what the code shows, and the names follow Prometheus' conventions."""

from __future__ import annotations

import re

import pytest

from tools.generate_metrics_table import (
    PAGE,
    DescribedMetric,
    described_metrics,
    page_with_tables,
)

METRICS = [metric for table in described_metrics().values() for metric in table]

# What a name of a gauge or histogram may end with: a base unit, or the plural of what is counted.
BASE_UNITS = ("_seconds", "_bytes", "_bytes_per_second", "_ratio")
NO_BASE_UNIT = re.compile(
    r"_(ms|us|ns|s|sec|milliseconds|microseconds|minutes|hours|mib|gib|kb|mb|gb|kilobytes|megabytes"
    r"|percent|pct)(_|$)"
)
KIND_IN_NAME = re.compile(r"_(counter|gauge|histogram|summary|metric)(_|$)")


def test_the_page_is_current() -> None:
    page = PAGE.read_text()
    assert page_with_tables(page) == page


def test_a_page_that_misses_a_metric_is_not() -> None:
    row = next(line for line in PAGE.read_text().splitlines() if "pdserve_kv_pairs" in line)
    stale = PAGE.read_text().replace(row + "\n", "")
    assert page_with_tables(stale) == PAGE.read_text() != stale


def test_the_tables_hold_every_kind() -> None:
    kinds = {metric.kind for metric in METRICS}
    assert kinds == {"counter", "gauge", "histogram"}
    stage = next(metric for metric in METRICS if metric.name == "pdserve_ttft_stage_seconds")
    assert stage.labels == ("stage",)
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 50


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_the_name_follows_the_conventions(metric: DescribedMetric) -> None:
    assert problems_of(metric) == []


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("pdserve_requests", "counter", "a counter ends with _total"),
        ("pdserve_requests_total", "gauge", "only a counter ends with _total"),
        ("pdserve_step_ms", "gauge", "not a base unit"),
        ("pdserve_wait_milliseconds_total", "counter", "not a base unit"),
        ("pdserve_latency", "histogram", "a histogram names its unit"),
        ("pdserve_nodes_gauge", "gauge", "the type is in the name"),
        ("pdserve_budgetUsed", "gauge", "wanted pdserve_ and snake_case"),
        ("requests_total", "counter", "wanted pdserve_ and snake_case"),
        ("pdserve_used_count", "gauge", "the suffix is a histogram's own"),
    ],
)
def test_what_breaks_a_convention(name: str, kind: str, problem: str) -> None:
    assert problems_of(DescribedMetric(name, kind, (), "Text")) == [problem]


def problems_of(metric: DescribedMetric) -> list[str]:
    name = metric.name
    rules = {
        "wanted pdserve_ and snake_case": re.fullmatch(r"pdserve(_[a-z0-9]+)+", name) is not None,
        "a counter ends with _total": metric.kind != "counter" or name.endswith("_total"),
        "only a counter ends with _total": metric.kind == "counter" or not name.endswith("_total"),
        "not a base unit": NO_BASE_UNIT.search(name) is None,
        "a histogram names its unit": metric.kind != "histogram" or name.endswith(BASE_UNITS),
        "the type is in the name": KIND_IN_NAME.search(name) is None,
        "the suffix is a histogram's own": not name.endswith(("_count", "_sum", "_bucket")),
        "no label is reserved": not {"le", "quantile", "job", "instance"} & set(metric.labels),
        "it explains itself": len(metric.text) > 3 and not metric.text.endswith("."),
    }
    return [problem for problem, holds in rules.items() if not holds]
