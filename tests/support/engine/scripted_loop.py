"""A step loop whose flow, inbox and runner are scripted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.runner_contract import (
    OnLayer,
    OnQueued,
    RunnerResult,
    ScheduledSequence,
)
from engine.core.sequences.sequence import Sequence as EngineSequence
from engine.core.step.step_batch import batch_of
from engine.core.step.step_in_flight import BlockCopy, PlannedStep, Preempted, Pushes
from engine.step_loop import StepLoop
from tests.support.clocks.manual_clock import ManualClock
from tests.support.engine.build import make_request


class ScriptedInbox:
    """Batches of messages, handed out one per turn; closed when they are used up and waited for."""

    def __init__(self, *batches: list[str]) -> None:
        self.batches = list(batches)
        self.timeouts: list[float | None] = []
        self.is_closed = False

    def take_all(self) -> list[str]:
        return self.batches.pop(0) if self.batches else []

    def wait(self, timeout_s: float | None) -> None:
        self.timeouts.append(timeout_s)
        if not self.batches:
            self.is_closed = True


class ScriptedFlow:
    """Writes down what happens; `steps` says how many sequences each step schedules."""

    def __init__(self, log: list[str], steps: list[int], deadline_s: float | None = None) -> None:
        self.log = log
        self.steps = steps
        self.deadline_s = deadline_s
        self.num_preempted = 0
        self.preempted: Preempted | None = None
        self.swap_outs: list[BlockCopy] = []
        self.swap_ins: list[BlockCopy] = []
        self.next_pushes: Pushes[str] | None = None
        self.unreported: list[str] = []

    def _say(self, event: str) -> Iterable[str]:
        self.log.append(event)
        yield f"effect of {event}"

    def on_message(self, message: str, now_s: float) -> Iterable[str]:
        return self._say(message)

    def on_time(self, now_s: float) -> Iterable[str]:
        return self._say(f"time {now_s:g}")

    def next_deadline_s(self) -> float | None:
        return self.deadline_s

    def begin_step(self, now_s: float) -> tuple[PlannedStep, Iterable[str]]:
        count = self.steps.pop(0) if self.steps else 0
        sequence = EngineSequence(1, make_request(1))
        scheduled = ScheduledSequence(1, [1], 0, [0], None)
        step = PlannedStep(
            batch_of([scheduled] * count), [sequence] * count, num_preempted=self.num_preempted
        )
        step.preempted = self.preempted
        step.swap_outs = list(self.swap_outs)
        step.swap_ins = list(self.swap_ins)
        return step, list(self._say("begin"))

    def pushes(self, step: PlannedStep) -> Pushes[str] | None:
        return self.next_pushes

    def plan_ahead(self, step: PlannedStep) -> None:
        self.log.append(f"plan ahead of {len(step.batch)}")

    def end_step(self, step: PlannedStep, results: RunnerResult, now_s: float) -> None:
        self.log.append(f"end {len(results)}")
        self.unreported.append(f"effect of end {len(results)}")

    def report(self) -> Iterable[str]:
        unreported, self.unreported = self.unreported, []
        return unreported

    def fail_step(self, step: PlannedStep, error: Exception, now_s: float) -> Iterable[str]:
        return [*self.report(), *self._say(f"fail {len(step.sequences)} of {error}")]

    def on_stop(self) -> Iterable[str]:
        return [*self.report(), *self._say("stop")]


class ScriptedRunner:
    def __init__(self, log: list[str], error: Exception | None = None) -> None:
        self.log = log
        self.error = error

    def execute(
        self,
        batch: Sequence[ScheduledSequence],
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        self.log.append("run")
        if on_queued is not None:
            on_queued()
        for layer in range(2 if on_layer is not None else 0):
            self.log.append(f"layer {layer}")
            assert on_layer is not None
            on_layer(layer)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return RunnerResult([None] * len(batch))

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        self.log.append(f"out {block_ids} to {host_block_ids}")

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self.log.append(f"in {host_block_ids} to {block_ids}")


class SlowRunner(ScriptedRunner):
    """Each step takes a quarter of a second."""

    def __init__(
        self, clock: ManualClock, log: list[str] | None = None, error: Exception | None = None
    ) -> None:
        super().__init__([] if log is None else log, error)
        self._clock = clock

    def execute(
        self,
        batch: Sequence[ScheduledSequence],
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        self._clock.advance(0.25)
        return super().execute(batch, on_layer, on_queued)


def make_loop(
    inbox: ScriptedInbox,
    flow: ScriptedFlow,
    error: Exception | None = None,
    at_s: float = 0.0,
    *,
    is_async: bool = False,
) -> StepLoop[str, str]:
    log = flow.log
    return StepLoop(
        inbox=inbox,
        flow=flow,
        runner=ScriptedRunner(log, error),
        perform=log.append,
        flush=lambda: log.append("flush"),
        clock=ManualClock(at_s),
        is_async=is_async,
    )
