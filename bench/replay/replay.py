"""One replay: a mixed node of `simulator/` without a router; requests arrive as in the trace.

Each step is planned by `Scheduler.plan`, takes as long as in the cost model, and is answered by
made-up tokens. The replay checks every step itself: tokens beyond the budget, sequences beyond the
seats, a token written outside its sequence's blocks or into a block that another sequence writes,
are counted as overruns.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

from bench.replay.rows import Row
from bench.scheduler.local_node import tickets_without_kv
from common.errors import InternalError
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from common.request import FinishReason, RequestOutput
from common.settings.config import SchedulingConfig
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import RunnerResult
from engine.core.scheduler import Scheduler
from engine.core.step.step_batch import StepBatch
from engine.core.step.step_in_flight import PlannedStep
from node.flow.flow_limits import FlowLimits
from node.flow.messages import Effect, Submit
from node.flow.node_flow import NodeFlow
from node.flow.pulls.pull_cost import PullCost
from simulator.clients import client_requests
from simulator.execution import ModelledExecution
from simulator.kv_network import ModelledNetwork
from simulator.node import NodeSaid, SimulatedNode
from simulator.profile import VOCAB_SIZE
from simulator.served import ServedRequest, TokenTimes
from simulator.step_cost import StepCost
from simulator.timeline import Timeline
from simulator.trace_file import TraceRequest

_NODE, _ROUTER = Incarnation("node", 1), Incarnation("router", 1)
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


@dataclass(slots=True, kw_only=True)
class Served(ServedRequest):
    """The times of one request, in seconds of the virtual clock."""

    began_at_s: float = -1.0
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


class _WatchedFlow(NodeFlow):
    """A node that computes every prompt itself, and tells of its steps."""

    def __init__(self, replay: Replay, scheduler: Scheduler, limits: FlowLimits) -> None:
        super().__init__(
            scheduler,
            limits,
            tickets=tickets_without_kv(_NODE),
            needs_staging=False,
            local_prefill_threshold=0,
            pull_cost=PullCost(1.0, float),
        )
        self._replay = replay

    def begin_step(self, now_s: float) -> tuple[PlannedStep, list[Effect]]:
        step, effects = super().begin_step(now_s)
        if step.batch:
            self._replay.on_step_begun(step.batch)
        elif self.scheduler.waiting and not step.made_progress:
            self._replay.on_idle_wait()
        return step, effects

    def end_step(self, step: PlannedStep, results: RunnerResult, now_s: float) -> None:
        super().end_step(step, results, now_s)
        self._replay.on_step_ended(step, now_s)


class Replay:
    """Drives one simulated node through a trace; `run` once."""

    def __init__(
        self,
        requests: Items[TraceRequest],
        setup: ReplaySetup,
        row: Row,
        base: SchedulingConfig,
        cost: StepCost,
    ) -> None:
        config = row.config(base)
        clients = client_requests(requests, max_model_len=setup.max_model_len, seed=setup.seed)
        if row.knows_lengths:
            clients = [replace(one, max_tokens=one.trace.num_output) for one in clients]
        self._setup = setup
        served = [Served(one, one.trace.arrival_s / setup.speed_up) for one in clients]
        self._result = ReplayResult(served, len(requests) - len(clients))
        self._coming = iter(enumerate(served))
        self._live: dict[str, Served] = {}
        self._steps_per_sample = 1
        self._use = 0.0
        self._timeline = Timeline()
        self._scheduler = _scheduler(setup, row, config, cost)
        limits = FlowLimits(
            vocab_size=VOCAB_SIZE,
            max_model_len=setup.max_model_len,
            max_queued_requests=len(served) + 1,
        )
        flow = _WatchedFlow(self, self._scheduler, limits)
        layout = KVLayout(
            model_digest="replay",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=setup.block_size,
            dtype="bfloat16",
        )
        network = ModelledNetwork(self._timeline, layout, bytes_per_s=1.0, latency_s=0.0)
        execution = ModelledExecution(
            self._timeline,
            cost,
            self._scheduler,
            num_layers=layout.num_layers,
            may_repeat=False,
            next_due_s=flow.next_deadline_s,
        )
        self._node = SimulatedNode(
            _NODE,
            self._timeline,
            flow,
            execution,
            network,
            layout,
            max_queued_requests=len(served) + 1,
            tell=self._on_said,
        )

    def run(self) -> ReplayResult:
        """Serve every request to its end. Raises `InternalError` if the scheduler stalls."""
        self._admit()
        self._timeline.run()
        if self._live:
            raise InternalError(f"{len(self._live)} requests wait and no step ever runs")
        self._scheduler.check()
        statistics = self._scheduler.statistics()
        result = self._result
        result.num_preemptions = statistics.counters.num_preemptions
        result.num_recomputed_tokens = statistics.counters.num_recomputed_tokens
        return result

    def on_step_begun(self, batch: StepBatch) -> None:
        """Count the limits that a step breaks, and see how full the pool is."""
        self._result.num_overruns += num_overruns(batch, self._setup)
        self._use = 1 - self._scheduler.pool.num_available / self._setup.num_blocks

    def on_idle_wait(self) -> None:
        """Count an empty step while a request waits: the pool is free, and still none is seated."""
        self._result.num_idle_waits += 1

    def on_step_ended(self, step: PlannedStep, now_s: float) -> None:
        """Add a step to the figures."""
        result = self._result
        result.num_steps += 1
        result.busy_s += step.took_s
        result.pool_use_s += self._use * step.took_s
        result.peak_pool_use = max(result.peak_pool_use, self._use)
        result.sequence_steps += len(step.batch)
        result.completion_s = now_s
        if result.num_steps % _STEPS_PER_CHECK == 0:
            self._scheduler.check()
        if result.num_steps % self._steps_per_sample == 0:
            self._sample()

    def _admit(self) -> None:
        """Schedule the arrival of the next request, which schedules the one after it."""
        index, served = next(self._coming, (-1, None))
        if served is not None:
            self._timeline.at(served.arrived_at_s, partial(self._arrive, index, served))

    def _arrive(self, index: int, served: Served) -> None:
        request = served.client.generation_request()
        self._live[request.id.choice_id] = served
        self._node.put(
            Submit(
                request=request,
                router=_ROUTER,
                reply_to=index,
                received_at_s=self._timeline.now_s(),
                must_prefill_locally=True,
            )
        )
        self._admit()

    def _on_said(self, said: NodeSaid) -> None:
        for output in said.outputs:
            served = self._live[output.id.choice_id]
            self._record(served, output)
            if output.details.finish_reason is not None:
                del self._live[output.id.choice_id]

    def _record(self, served: Served, output: RequestOutput) -> None:
        now_s, reason = self._timeline.now_s(), output.details.finish_reason
        if reason is FinishReason.ERROR:
            self._result.num_starved += 1
            return
        if not served.num_tokens:
            served.began_at_s = served.arrived_at_s + output.details.queue_s
        served.on_tokens(len(output.token_ids), TokenTimes.of([now_s]))
        served.num_ends += reason is not None

    def _sample(self) -> None:
        """Sample at equal distances in steps; when there are too many, drop every second one."""
        statistics, samples = self._scheduler.statistics(), self._result.samples
        samples.append(
            Sample(
                self._timeline.now_s(),
                self._use,
                statistics.num_running,
                statistics.num_waiting,
                statistics.counters.num_preemptions,
                statistics.new_token_ratio,
            )
        )
        if len(samples) == _MOST_SAMPLES:
            del samples[::2]
            self._steps_per_sample *= 2


def _scheduler(setup: ReplaySetup, row: Row, config: SchedulingConfig, cost: StepCost) -> Scheduler:
    is_swapping = config.preemption_mode == "swap"
    scheduler = Scheduler(
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
    scheduler.reservation = row.reservation(config, setup.block_size)
    return scheduler


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
