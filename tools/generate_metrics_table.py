"""Write the tables of `docs/metrics.md` from the metrics, or check that they are current.

Usage: python tools/generate_metrics_table.py [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from common.nodes import Role
from common.observing.clock import MonotonicClock
from common.observing.latency import LatencyTargets
from engine.core.blocks.block_pool import BlockCounts
from engine.core.grammar_statistics import GrammarStatistics
from engine.core.statistics import DiskSize, SchedulerStatistics, StepCounters
from http_serving.certificate import show_end
from http_serving.process_metrics import BuildInfo, CertificateEnd
from kv_transfer.connector.statistics import ConnectorStatistics
from kv_transfer.connector.transfer_metrics import TransferMetrics
from node.flow.messages import NodeStatistics
from node.flow.step_progress import StepProgress
from node.watch.grammar_metrics import GrammarCollector
from node.watch.kv_metrics import KvCollector
from node.watch.metrics import (
    LeaseCollector,
    MemoryCollector,
    NodeCollector,
    SavedPrefillCollector,
)
from router.access.api_key_book import ApiKeyBook
from router.access.api_key_metrics import ApiKeyCollector
from router.access.refused_logins import RefusedLogins
from router.core.scaling.scaling import RoleScaling
from router.http.server import count_refused
from router.watch.http_metrics import HttpMetrics
from router.watch.router_metrics import RouterMetrics
from router.watch.scaling_report import ScalingReport

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->\n)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DescribedMetric:
    """One metric by the name under which Prometheus stores it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class _Registry(CollectorRegistry):
    """Keeps all registered metrics, since a metric with labels but no samples collects nothing."""

    def __init__(self) -> None:
        super().__init__(auto_describe=False)
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)


def described_metrics() -> dict[str, list[DescribedMetric]]:
    """Return the metrics of each table: of every process, a router, a node, its KV transfers."""
    process, router, node, kv = _Registry(), _Registry(), _Registry(), _Registry()
    process.register(BuildInfo(lambda: Role.ROUTER))
    process.register(CertificateEnd(None))
    HttpMetrics(router)
    RouterMetrics(router)
    targets = LatencyTargets(ttft_s=1.0, tpot_s=1.0)
    ScalingReport(router, RoleScaling(targets).decide([], 0.0), auto_roles=False)
    router.register(ApiKeyCollector(ApiKeyBook(MonotonicClock())))
    RefusedLogins(MonotonicClock(), router)
    count_refused(router)
    show_end(router, None)
    node.register(NodeCollector(_node_statistics, {}, StepProgress(0.0)))
    node.register(SavedPrefillCollector(_node_statistics, block_size=1, token_s=0.0))
    node.register(LeaseCollector({}))
    node.register(GrammarCollector(_grammar_statistics))
    node.register(MemoryCollector(None, kv_bytes=0, swap_bytes=0))
    kv.register(KvCollector(_connector_statistics))
    tables = {"process": process, "router": router, "node": node, "kv": kv}
    return {name: list(_described(registry)) for name, registry in tables.items()}


def page_with_tables(page: str) -> str:
    """Return `page` with new text between its markers. Raises `KeyError` for an unknown table."""
    metrics = described_metrics()
    return _TABLE.sub(lambda found: found[1] + _table(metrics[found[2]]) + found[3], page)


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    old = PAGE.read_text()
    new = page_with_tables(old)
    if not sys.argv[1:]:
        PAGE.write_text(new)
    elif new != old:
        print("docs/metrics.md is out of date: run `make docs`", file=sys.stderr)
        return 1
    return 0


def _described(registry: _Registry) -> Iterator[DescribedMetric]:
    for collector in registry.collectors:
        for family in collector.collect():
            # The library stores label names where it made the metric, or in the family.
            known: Any = collector if hasattr(collector, "_labelnames") else family
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield DescribedMetric(name, family.type, known._labelnames, family.documentation)


def _table(metrics: list[DescribedMetric]) -> str:
    rows = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(rows) + "\n"


def _node_statistics() -> NodeStatistics:
    scheduler = SchedulerStatistics(
        counters=StepCounters(),
        method="none",
        blocks=BlockCounts(free=0, cached=0, running=0, reserved=0, receiving=0, quarantined=0),
        num_host_blocks_used=0,
        num_prefix_host_blocks=0,
        disk=DiskSize(),
        new_token_ratio=0.0,
        num_running=0,
        num_waiting=0,
        num_queued_tokens=0,
        highest_num_bypassed=0,
        max_num_seqs=1,
        max_num_batched_tokens=1,
    )
    return NodeStatistics(scheduler=scheduler, num_transfers=0)


def _grammar_statistics() -> GrammarStatistics:
    return GrammarStatistics(
        compile_s={},
        lookups={},
        num_cached=0,
        cached_bytes=0,
        num_masks=0,
        masks_s=0.0,
        waited_s=0.0,
        num_forced_drafted=0,
        num_forced_accepted=0,
        failures={},
    )


def _connector_statistics() -> ConnectorStatistics:
    return ConnectorStatistics(
        bytes_sent=0,
        bytes_received=0,
        transfers_open=0,
        landings_open=0,
        sessions_open=0,
        blocks_quarantined=0,
        lanes={},
        frames_dropped={},
        checksum_failures={},
        measured=TransferMetrics(["zmq"]).view(),
    )


if __name__ == "__main__":
    sys.exit(main())
