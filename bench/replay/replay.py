"""One replay: the real scheduler, a virtual clock, and no model.

Requests arrive as in the trace. Each step is planned by `Scheduler.plan`, takes as long as in the
cost model, and is answered by made-up tokens. The replay checks every step itself: tokens beyond
the budget, sequences beyond the seats, a token written outside its sequence's blocks or into a
block that another sequence writes, are counted as overruns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from bench.replay.rows import Row
from common.errors import InternalError
from common.settings.config import SchedulingConfig
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import (
    DrawnTokens,
    RunnerResult,
)
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_batch import StepBatch
from engine.core.step.step_in_flight import PlannedStep
from simulator.clients import FILLER_TOKEN_ID, STOP_TOKEN_ID, ClientRequest, client_requests
from simulator.step_cost import StepCost
from simulator.trace_file import TraceRequest

DEFAULT_BLOCK_SIZE = 64
_STEPS_PER_CHECK = 256
"""Steps between two checks of the scheduler, which walk through the whole pool."""
_MOST_SAMPLES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """A node and its load. `speed_up` divides the gaps between arrivals."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = DEFAULT_BLOCK_SIZE
    longest_context: int = 131_072
    speed_up: float = 1.0
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        """The model's longest context, limited to a sequence that fits the pool."""
        return min(self.longest_context, (self.num_blocks - 1) * self.block_size)


@dataclass(slots=True)
class Served:
    """The times of one request, in seconds of the virtual clock."""

    client: ClientRequest
    arrived_at_s: float
    began_at_s: float = -1.0
    first_at_s: float = -1.0
    last_at_s: float = -1.0
    num_tokens: int = 0
    longest_gap_s: float = 0.0
    num_ends: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The node at one moment, for pictures. `pool_use` and `ratio` are shares of 1."""

    at_s: float
    pool_use: float
    num_running: int
    num_waiting: int
    num_preemptions: int
    ratio: float


@dataclass(slots=True)
class ReplayResult:
    """What one replay measured. Means over time weigh each step with its span."""

    served: list[Served]
    num_refused: int
    num_overruns: int = 0
    num_starved: int = 0
    num_idle_waits: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    completion_s: float = 0.0
    busy_s: float = 0.0
    pool_use_s: float = 0.0
    peak_pool_use: float = 0.0
    sequence_steps: int = 0
    samples: list[Sample] = field(default_factory=list)


class Replay:
    """Drives one scheduler through a trace; `run` once."""

    def __init__(
        self,
        requests: Items[TraceRequest],
        setup: ReplaySetup,
        row: Row,
        base: SchedulingConfig,
        cost: StepCost,
    ) -> None:
        config = row.config(base)
        self._knows_lengths = row.knows_lengths
        clients = client_requests(requests, max_model_len=setup.max_model_len, seed=setup.seed)
        self._setup = setup
        self._cost = cost
        self._arriving = deque(Served(c, c.trace.arrival_s / setup.speed_up) for c in clients)
        self._result = ReplayResult(list(self._arriving), len(requests) - len(clients))
        self._live: dict[int, Served] = {}
        self._now_s = 0.0
        self._steps_per_sample = 1
        is_swapping = config.preemption_mode == "swap"
        self._scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=setup.max_num_seqs,
                max_num_batched_tokens=setup.max_num_batched_tokens,
                block_size=setup.block_size,
                max_model_len=setup.max_model_len,
                chunk_granularity=config.chunk_granularity,
                pairs_per_token=cost.pairs_per_token if row.counts_attention else 0,
            ),
            num_blocks=setup.num_blocks,
            fingerprint="replay",
            eos_token_ids=frozenset(),
            config=config,
            num_host_blocks=setup.num_blocks if is_swapping else 0,
        )
        self._scheduler.reservation = row.reservation(config, setup.block_size)

    def run(self) -> ReplayResult:
        """Serve every request to its end. Raises `InternalError` if the scheduler stalls."""
        while self._arriving or self._live:
            self._admit_arrivals()
            step = self._scheduler.plan()
            self._end_starved(step)
            if step.batch:
                self._run_step(step)
            elif not step.num_preempted:
                self._skip_to_next_arrival()
        self._scheduler.check()
        statistics = self._scheduler.statistics()
        result = self._result
        result.num_preemptions = statistics.counters.num_preemptions
        result.num_recomputed_tokens = statistics.counters.num_recomputed_tokens
        result.completion_s = self._now_s
        return result

    def _admit_arrivals(self) -> None:
        while self._arriving and self._arriving[0].arrived_at_s <= self._now_s:
            served = self._arriving.popleft()
            sequence = Sequence(served.client.index, served.client.generation_request())
            self._live[sequence.sequence_id] = served
            self._scheduler.add(sequence)
            if self._knows_lengths:
                sequence.max_new_tokens = served.client.trace.num_output

    def _skip_to_next_arrival(self) -> None:
        if self._live:
            # An empty step while a request waits: the pool is free, and still none is seated.
            self._result.num_idle_waits += 1
            if not self._arriving:
                raise InternalError(f"{len(self._live)} requests wait and no step ever runs")
        if self._arriving:
            self._now_s = max(self._now_s, self._arriving[0].arrived_at_s)

    def _end_starved(self, step: PlannedStep) -> None:
        for sequence in step.starved:
            self._scheduler.finish(sequence)
            del self._live[sequence.sequence_id]
            self._result.num_starved += 1

    def _run_step(self, step: PlannedStep) -> None:
        result, began_s = self._result, self._now_s
        result.num_overruns += num_overruns(step.batch, self._setup)
        num_copied = sum(len(copy.block_ids) for copy in (*step.swap_outs, *step.swap_ins))
        span_s = self._cost.step_s(step.batch, num_copied)
        pool = self._scheduler.pool
        use = 1 - pool.num_available / self._setup.num_blocks
        result.num_steps += 1
        result.busy_s += span_s
        result.pool_use_s += use * span_s
        result.peak_pool_use = max(result.peak_pool_use, use)
        result.sequence_steps += len(step.batch)
        self._now_s = began_s + span_s
        is_sampled = step.batch.is_sampled.tolist()
        results = [
            self._draw(*one, began_s) for one in zip(step.sequences, is_sampled, strict=True)
        ]
        for output in self._scheduler.apply(step, RunnerResult(results)):
            served = self._live[output.sequence.sequence_id]
            self._record(served, len(output.token_ids))
            if output.finish_reason is not None:
                served.num_ends += 1
                del self._live[output.sequence.sequence_id]
        if result.num_steps % _STEPS_PER_CHECK == 0:
            self._scheduler.check()
        if result.num_steps % self._steps_per_sample == 0:
            self._sample(use)

    def _sample(self, use: float) -> None:
        """Sample at equal distances in steps; when there are too many, drop every second one."""
        statistics, samples = self._scheduler.statistics(), self._result.samples
        samples.append(
            Sample(
                self._now_s,
                use,
                statistics.num_running,
                statistics.num_waiting,
                statistics.counters.num_preemptions,
                statistics.new_token_ratio,
            )
        )
        if len(samples) == _MOST_SAMPLES:
            del samples[::2]
            self._steps_per_sample *= 2

    def _draw(self, sequence: Sequence, is_sampled: bool, began_s: float) -> DrawnTokens | None:
        served = self._live[sequence.sequence_id]
        if served.began_at_s < 0:
            served.began_at_s = began_s
        if not is_sampled:
            return None
        is_last = sequence.num_output + 1 == served.client.trace.num_output
        return DrawnTokens((STOP_TOKEN_ID if is_last else FILLER_TOKEN_ID,))

    def _record(self, served: Served, num_tokens: int) -> None:
        if served.num_tokens:
            served.longest_gap_s = max(served.longest_gap_s, self._now_s - served.last_at_s)
        else:
            served.first_at_s = self._now_s
        served.last_at_s = self._now_s
        served.num_tokens += num_tokens


def num_overruns(batch: StepBatch, setup: ReplaySetup) -> int:
    """Return how often a step breaks a limit: budget, seats, the sequences' blocks, the pool."""
    size = setup.block_size
    count = 0
    written: set[int] = set()
    tables, held = batch.seats.block_tables, batch.seats.num_blocks[batch.rows].tolist()
    firsts, lasts = batch.starts // size, (batch.starts + batch.num_tokens - 1) // size
    spans = zip(batch.rows.tolist(), firsts.tolist(), lasts.tolist(), held, strict=True)
    for row, first, last, num_held in spans:
        blocks = tables[row, first : min(last + 1, num_held)].tolist()
        count += len(blocks) <= last - first
        for block_id in blocks:
            count += block_id in written or not 0 <= block_id < setup.num_blocks
            written.add(block_id)
    count += int(batch.num_tokens.sum()) > setup.max_num_batched_tokens
    return count + (len(batch) > setup.max_num_seqs)
