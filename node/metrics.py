"""A node's statistics as Prometheus samples, made when somebody asks.

What is counted is counted once, where it happens; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.statistics import SchedulerStatistics
from kv_transfer.statistics import ConnectorStatistics
from node.kv_metrics import KvCollector
from node.messages import NodeStatistics


class NodeCollector(Collector):
    """Reads the latest statistics, which any thread may do, and refusals by their error's code."""

    def __init__(self, latest: Callable[[], NodeStatistics], refusals: Mapping[str, int]) -> None:
        self._latest = latest
        self._refusals = refusals

    def collect(self) -> Iterable[Metric]:
        """Every sample, all from one moment."""
        statistics = self._latest()
        yield from _sequences(statistics)
        yield _counters(
            "refusals",
            "Reservations and prompts refused, by the error's code",
            "reason",
            self._refusals,
        )
        yield from _blocks(statistics.scheduler)
        yield from _steps(statistics.scheduler)
        yield from _preemptions(statistics.scheduler)
        yield from _drafts(statistics.scheduler)


def node_registry(
    latest: Callable[[], NodeStatistics],
    refusals: Mapping[str, int],
    connector: Callable[[], ConnectorStatistics],
) -> CollectorRegistry:
    """A registry of this node alone, to be read where `refusals` is written."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(latest, refusals))
    registry.register(KvCollector(connector))
    ProcessCollector(registry=registry)
    return registry


def _sequences(statistics: NodeStatistics) -> Iterator[Metric]:
    scheduler = statistics.scheduler
    yield _gauge("running_sequences", "Sequences with a seat", scheduler.num_running)
    yield _gauge("waiting_sequences", "Sequences without a seat", scheduler.num_waiting)
    yield _gauge(
        "open_transfers",
        "Landings and transfers under way, as the node's books have them",
        statistics.num_transfers,
    )
    yield _gauge(
        "head_passed_sequences",
        "Sequences admitted before the one that waits longest for blocks",
        scheduler.highest_num_passed,
    )
    yield _counters(
        "admission_stops", "Plans by the rule that ended their admissions", "rule", scheduler.stops
    )


def _blocks(scheduler: SchedulerStatistics) -> Iterator[Metric]:
    blocks = scheduler.blocks
    states = {
        "free": blocks.free,
        "cached": blocks.cached,
        "running": blocks.running,
        "reserved": blocks.reserved,
        "receiving": blocks.receiving,
        "quarantined": blocks.quarantined,
    }
    family = GaugeMetricFamily(
        "pdserve_kv_blocks",
        "KV blocks: free, cached (can be evicted), running, reserved, receiving or quarantined",
        labels=["state"],
    )
    for state, count in states.items():
        family.add_metric([state], count)
    yield family
    yield _gauge(
        "growth_blocks",
        "Blocks kept back for the outputs of running sequences",
        scheduler.num_growth_blocks,
    )
    yield _gauge(
        "new_token_ratio",
        "Share of the remaining outputs for which blocks are kept back; 0: the policy has none",
        scheduler.new_token_ratio,
    )


def _steps(scheduler: SchedulerStatistics) -> Iterator[Metric]:
    tokens = {
        "decode": scheduler.num_decode_tokens,
        "draft": scheduler.num_draft_tokens,
        "chunk": scheduler.num_chunk_tokens,
    }
    yield _counter("steps", "Steps planned", scheduler.num_steps)
    yield _counters(
        "step_tokens",
        "Tokens planned into steps: decode, draft or chunk (of a prompt)",
        "kind",
        tokens,
    )
    yield _gauge(
        "last_step_tokens", "Tokens planned into the latest step", scheduler.last_step_tokens
    )
    budget = scheduler.max_num_batched_tokens
    yield _gauge("step_budget_tokens", "Most tokens one step may compute", budget)
    yield _gauge(
        "step_budget_used_ratio",
        "Share of the token budget that the latest step used",
        scheduler.last_step_tokens / budget,
    )


def _preemptions(scheduler: SchedulerStatistics) -> Iterator[Metric]:
    yield _counters(
        "preemptions", "Sequences that lost their blocks", "reason", scheduler.preemptions
    )
    yield _counter(
        "recomputed_tokens",
        "Tokens computed again after a preemption",
        scheduler.num_recomputed_tokens,
    )
    yield _counter("swapped_out_blocks", "Blocks copied to host memory", scheduler.num_swapped_out)
    yield _gauge("swapped_blocks", "Blocks of host memory in use", scheduler.num_host_blocks_used)


def _drafts(scheduler: SchedulerStatistics) -> Iterator[Metric]:
    method = scheduler.method
    yield _counters(
        "draft_tokens", "Draft tokens verified", "method", {method: scheduler.num_drafted}
    )
    yield _counters(
        "accepted_tokens",
        "Draft tokens that became output",
        "method",
        {method: scheduler.num_accepted},
    )
    yield _counters(
        "speculative_steps",
        "Sequences' steps that verified drafts",
        "method",
        {method: scheduler.num_speculative_steps},
    )
    length = GaugeMetricFamily(
        "pdserve_acceptance_length_tokens",
        "Mean tokens out of a sequence's step that verified drafts; 0 before the first one",
        labels=["method"],
    )
    length.add_metric([method], scheduler.acceptance_length)
    yield length


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pdserve_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"pdserve_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"pdserve_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
