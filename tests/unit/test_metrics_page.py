"""`docs/metrics.md` names every metric that a router and a node show, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from node.kv_metrics import KvCollector
from node.metrics import NodeCollector
from router.http_metrics import HttpMetrics
from router.metrics import RouterMetrics
from tests.unit.node.test_kv_metrics import connector_statistics
from tests.unit.node.test_metrics import STATISTICS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def shown() -> set[str]:
    registry = CollectorRegistry(auto_describe=False)
    HttpMetrics(registry)
    RouterMetrics(registry)
    registry.register(NodeCollector(lambda: STATISTICS, {}))
    registry.register(KvCollector(connector_statistics))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    # The client library also tells when it made each of its own.
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families
        if not family.name.endswith("_created")
    }


def test_the_page_lists_what_is_shown() -> None:
    first_cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if "|" in line]
    listed = {name for cell in first_cells for name in re.findall(r"`(pdserve_\w+)`", cell)}
    assert listed == shown()
