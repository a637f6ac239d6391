"""A node's statistics as Prometheus samples, made at each scrape; nothing is counted here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.kv.memory_plan import MemoryPlan
from engine.core.blocks.block_pool import BlockCounts
from engine.core.grammar_statistics import GrammarStatistics
from engine.core.statistics import SchedulerStatistics
from kv_transfer.connector.statistics import ConnectorStatistics
from node.flow.messages import NodeStatistics
from node.flow.step_progress import StepProgress
from node.watch.grammar_metrics import GrammarCollector
from node.watch.kv_metrics import KvCollector
from node.watch.metric_families import counter, counters, gauge, gauges


class NodeCollector(Collector):
    """Reads the latest statistics, on any thread, and the refusals by their error's code."""

    def __init__(
        self,
        latest: Callable[[], NodeStatistics],
        refusals: Mapping[str, int],
        progress: StepProgress,
    ) -> None:
        self._latest = latest
        self._refusals = refusals
        self._progress = progress

    def collect(self) -> Iterable[Metric]:
        """Yield every sample, all from one moment."""
        statistics = self._latest()
        yield from _sequences(statistics)
        yield counters(
            "refusals",
            "Reservations and prompts refused, by the error's code",
            "reason",
            self._refusals,
        )
        yield from _blocks(statistics.scheduler)
        yield from _steps(statistics.scheduler)
        yield from _progress(self._progress)
        yield from _preemptions(statistics.scheduler)
        yield from _kept_prefixes(statistics.scheduler)
        yield from _drafts(statistics.scheduler)


class LeaseCollector(Collector):
    """Reads the heartbeats that failed, by the error's code."""

    def __init__(self, failures: Mapping[str, int]) -> None:
        self._failures = failures

    def collect(self) -> Iterable[Metric]:
        """Yield one counter."""
        yield counters(
            "lease_renewals_failed",
            "Heartbeats that the placement store did not take, by the error's code",
            "reason",
            self._failures,
        )


class MemoryCollector(Collector):
    """Shows the parts of a `MemoryPlan`, which do not change; without one the KV cache alone."""

    def __init__(self, plan: MemoryPlan | None, *, kv_bytes: int, swap_bytes: int) -> None:
        self._parts = {"kv_cache": kv_bytes, "swapped_kv": swap_bytes}
        if plan is not None:
            self._parts["step_buffers"] = plan.step_buffer_bytes
            self._parts["shared_weights"] = plan.shared_bytes

    def collect(self) -> Iterable[Metric]:
        """Yield one gauge."""
        yield gauges(
            "memory_bytes",
            "Bytes as they are stored: the KV cache, host memory for swapped blocks and prefixes, "
            "buffers of a step, and the packed weights, of which all nodes of a machine map one "
            "copy",
            "part",
            self._parts,
        )


class SavedPrefillCollector(Collector):
    """Shows what the tiers have saved, with blocks of so many tokens of so many seconds each."""

    def __init__(
        self, latest: Callable[[], NodeStatistics], *, block_size: int, token_s: float
    ) -> None:
        self._latest = latest
        self._block_s = block_size * token_s

    def collect(self) -> Iterable[Metric]:
        """Yield one counter."""
        found = self._latest().scheduler.counters.prefix_blocks_found
        yield counters(
            "prefix_saved_seconds",
            "Seconds that the cached starts of admitted prompts would have taken to compute, by "
            "the costs of steps measured at the start, by the tier that they were found in",
            "tier",
            {tier: num_blocks * self._block_s for tier, num_blocks in found.items()},
        )


def register_node(
    registry: CollectorRegistry,
    latest: Callable[[], NodeStatistics],
    refusals: Mapping[str, int],
    connector: Callable[[], ConnectorStatistics],
    progress: StepProgress,
    grammars: Callable[[], GrammarStatistics | None],
) -> None:
    """Add a node's metrics to `registry`, to be read on the thread that writes `refusals`."""
    registry.register(GrammarCollector(grammars))
    registry.register(NodeCollector(latest, refusals, progress))
    registry.register(KvCollector(connector))


def _sequences(statistics: NodeStatistics) -> Iterator[Metric]:
    scheduler = statistics.scheduler
    yield gauge("running_sequences", "Sequences with a seat", scheduler.num_running)
    yield gauge("waiting_sequences", "Sequences without a seat", scheduler.num_waiting)
    yield gauge("seats", "Sequences that may have a seat at once", scheduler.max_num_seqs)
    yield gauge(
        "seats_used_ratio",
        "Share of the seats that sequences have",
        scheduler.num_running / scheduler.max_num_seqs,
    )
    yield gauge(
        "queued_prompt_tokens",
        "Known tokens still to be computed, of waiting and running sequences; what is cached of a "
        "waiting one does not count",
        scheduler.num_queued_tokens,
    )
    yield gauge(
        "open_transfers",
        "Landings and transfers under way, as the node's books have them",
        statistics.num_transfers,
    )
    yield gauge(
        "head_passed_sequences",
        "Sequences admitted before the one that waits longest for blocks",
        scheduler.highest_num_bypassed,
    )
    yield counters(
        "admission_stops",
        "Plans by the rule that ended their admissions",
        "rule",
        scheduler.counters.stops,
    )
    yield counters(
        "plans_ahead",
        "Plans that were made while the step before ran (taken), or what prevented that",
        "rule",
        scheduler.counters.plans_ahead,
    )


def _blocks(scheduler: SchedulerStatistics) -> Iterator[Metric]:
    counted = scheduler.counters
    yield gauges(
        "kv_blocks",
        "KV blocks: free, cached (can be evicted), running, reserved, receiving or quarantined",
        "state",
        scheduler.blocks._asdict(),
    )
    yield gauge(
        "kv_blocks_used_ratio",
        "Share of the KV blocks that are neither free nor cached",
        _used_share(scheduler.blocks),
    )
    yield gauge(
        "growth_blocks",
        "Blocks kept back for the outputs of running sequences",
        counted.num_growth_blocks,
    )
    yield gauge(
        "new_token_ratio",
        "Share of the remaining outputs for which blocks are kept back; 0: the policy has none",
        scheduler.new_token_ratio,
    )


def _used_share(blocks: BlockCounts) -> float:
    total = sum(blocks)
    return 1 - (blocks.free + blocks.cached) / total if total else 0.0


def _steps(scheduler: SchedulerStatistics) -> Iterator[Metric]:
    counted = scheduler.counters
    tokens = {
        "decode": counted.num_decode_tokens,
        "draft": counted.num_draft_tokens,
        "chunk": counted.num_chunk_tokens,
    }
    yield counter("steps", "Steps planned", counted.num_steps)
    yield counters(
        "step_tokens",
        "Tokens planned into steps: decode, draft or chunk (of a prompt)",
        "kind",
        tokens,
    )
    yield counters(
        "step_seconds",
        "Seconds of steps that computed a part of a prompt (prompts), and of all others (decodes), "
        "but for those in which the node stood still",
        "computes",
        {"prompts": counted.prompt_steps_s, "decodes": counted.decode_steps_s},
    )
    yield gauge("last_step_tokens", "Tokens planned into the latest step", counted.last_step_tokens)
    budget = scheduler.max_num_batched_tokens
    yield gauge("step_budget_tokens", "Most tokens one step may compute", budget)
    yield gauge(
        "step_budget_used_ratio",
        "Share of the token budget that the latest step used",
        counted.last_step_tokens / budget,
    )


def _progress(progress: StepProgress) -> Iterator[Metric]:
    yield gauge(
        "seconds_without_progress",
        "How long the present turn of the step thread has lasted; 0: less than 0.25 s",
        progress.turn_s,
    )
    yield gauge(
        "seconds_without_progress_limit",
        "How long a turn may last before routers prefer other nodes",
        progress.limit_s,
    )


def _preemptions(scheduler: SchedulerStatistics) -> Iterator[Metric]:
    counted = scheduler.counters
    yield counters("preemptions", "Sequences that lost their blocks", "reason", counted.preemptions)
    yield counter(
        "recomputed_tokens",
        "Tokens computed again after a preemption",
        counted.num_recomputed_tokens,
    )
    yield counters(
        "prefix_pulls",
        "Prefixes that another node had cached: pulled (landed), failed, not there any more "
        "(missed), or computed because that was expected to be quicker (declined), the node failed "
        "to send lately (avoided), or there was no room",
        "outcome",
        counted.pulls,
    )
    yield counter(
        "prefix_pulled_tokens",
        "Prompt tokens whose KV was pulled from another node",
        counted.num_pulled_tokens,
    )
    yield counter(
        "prefix_fetched_tokens",
        "Those of them for which no prompt waited: what a node had that left, or that warmed this "
        "one when it started",
        counted.num_fetched_tokens,
    )
    yield counter("swapped_out_blocks", "Blocks copied to host memory", counted.num_swapped_out)
    yield gauge(
        "swapped_blocks",
        "Blocks of host memory that hold preempted sequences, or are being written",
        scheduler.num_host_blocks_used,
    )


def _kept_prefixes(scheduler: SchedulerStatistics) -> Iterator[Metric]:
    counted = scheduler.counters
    yield counters(
        "prefix_blocks_found",
        "Blocks with the start of admitted prompts: in the pool, copied back from host memory, or "
        "read from disk for them",
        "tier",
        counted.prefix_blocks_found,
    )
    yield counters(
        "prefix_blocks_sent",
        "Blocks of prefixes that other nodes have pulled from this one, by the tier that they were "
        "read from",
        "tier",
        counted.prefix_blocks_sent,
    )
    yield counters(
        "prefix_blocks_copied",
        "Blocks of prefixes copied out to host memory, or back in",
        "direction",
        {"out": counted.num_prefix_blocks_out, "in": counted.num_prefix_blocks_in},
    )
    yield gauge(
        "prefix_host_blocks",
        "Blocks of host memory that hold prefixes",
        scheduler.num_prefix_host_blocks,
    )
    yield counters(
        "prefix_disk_events",
        "Blocks of prefixes on disk: written, read, removed to make room, missed, declined "
        "(computing was expected to be quicker, or the disk failed lately), late, vanished or "
        "corrupt; and reads and writes that failed",
        "event",
        counted.disk,
    )
    yield gauges(
        "prefix_disk_blocks",
        "Blocks in this node's files, and those it has seen in files of other nodes of its host",
        "node",
        {"this": scheduler.disk.num_blocks, "others": scheduler.disk.num_others},
    )
    yield gauge(
        "prefix_disk_bytes",
        "Bytes of this node's files of prefixes, those of other models included",
        scheduler.disk.num_bytes,
    )


def _drafts(scheduler: SchedulerStatistics) -> Iterator[Metric]:
    method, counted = scheduler.method, scheduler.counters
    yield counters("draft_tokens", "Draft tokens verified", "method", {method: counted.num_drafted})
    yield counters(
        "accepted_tokens",
        "Draft tokens that became output",
        "method",
        {method: counted.num_accepted},
    )
    yield counters(
        "speculative_steps",
        "Sequences' steps that verified drafts",
        "method",
        {method: counted.num_speculative_steps},
    )
    yield gauges(
        "acceptance_length_tokens",
        "Mean tokens out of a sequence's step that verified drafts; 0 before the first one",
        "method",
        {method: counted.acceptance_length},
    )
