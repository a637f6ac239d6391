"""A step that runs beside the step thread: what happens while it runs, and what waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from common.errors import InternalError
from engine.core.runner_contract import (
    OnLayer,
    OnQueued,
    RunnerResult,
    ScheduledSequence,
    SequencesFailed,
)
from engine.core.step.step_in_flight import BlockCopy, PlannedStep, Pushes
from engine.step_loop import StepLoop
from tests.support.clocks.manual_clock import ManualClock
from tests.support.engine.scripted_loop import (
    ScriptedFlow,
    ScriptedInbox,
    ScriptedRunner,
    SlowRunner,
    make_loop,
)

WAIT_S = 20.0


class GatedRunner:
    """Says when a step has begun, and ends it when the test lets it."""

    def __init__(self) -> None:
        self.has_begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.num_running = 0
        self.threads: set[int] = set()

    def execute(
        self,
        batch: Sequence[ScheduledSequence],
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        self.num_running += 1
        self.threads.add(threading.get_ident())
        assert self.num_running == 1
        self.has_begun.release()
        assert on_queued is not None
        on_queued()
        assert self.may_end.acquire(timeout=WAIT_S)
        self.num_running -= 1
        return RunnerResult([None] * len(batch))

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        assert self.num_running == 0

    swap_in = swap_out


def has_run(log: list[str]) -> None:
    """Wait until the runner's thread has said that it ran."""
    until = time.monotonic() + WAIT_S
    while "run" not in log:
        assert time.monotonic() < until


def loop_over(
    runner: Any, flow: ScriptedFlow, *batches: list[str], perform: Callable[[str], None]
) -> StepLoop[str, str]:
    return StepLoop(
        inbox=ScriptedInbox(*batches), flow=flow, runner=runner, perform=perform,
        flush=lambda: flow.log.append("flush"), clock=ManualClock(5.0), is_async=True,
    )  # fmt: skip


def test_a_step_runs_across_the_end_of_a_turn_and_its_results_come_first_in_the_next() -> None:
    log: list[str] = []
    loop = make_loop(ScriptedInbox(["m1"], ["m2"]), ScriptedFlow(log, [2, 1]), is_async=True)
    assert loop.turn()
    assert [event for event in log if event != "run"][-2:] == ["flush", "plan ahead of 2"]
    assert "end 2" not in log
    has_run(log)
    del log[:]
    assert loop.turn()
    assert [event for event in log if event != "run"] == [
        "end 2",
        *("m2", "effect of m2"),
        *("time 0", "effect of time 0"),
        *("begin", "effect of begin"),
        "effect of end 2",
        "flush",
        "plan ahead of 1",
    ]
    has_run(log)
    del log[:]
    assert loop.turn()  # nothing began, yet something ended: what waits for that has its turn
    assert log[0] == "end 1"
    assert log[-2:] == ["effect of end 1", "flush"]
    assert not loop.turn()


def test_the_step_before_is_reported_and_the_next_one_planned_while_a_step_runs() -> None:
    runner = GatedRunner()
    seen: list[tuple[str, int]] = []

    class Watching(ScriptedFlow):
        def plan_ahead(self, step: PlannedStep) -> None:
            assert runner.has_begun.acquire(timeout=WAIT_S)
            seen.append(("plan ahead", runner.num_running))

    flow = Watching([], [1, 1, 1])
    steps = iter(range(3))

    def perform(effect: str) -> None:
        if effect == "effect of end 1":
            # It is performed after the next step was begun, which goes on until it may end.
            assert runner.may_end.acquire(blocking=False) is False
            seen.append(("report", next(steps)))

    loop = loop_over(runner, flow, perform=perform)
    loop.turn()
    for _ in range(2):
        runner.may_end.release()
        loop.turn()
    assert seen == [("plan ahead", 1), ("report", 0), ("plan ahead", 1), ("report", 1),
                    ("plan ahead", 1)]  # fmt: skip
    runner.may_end.release()
    loop.turn()
    assert runner.threads.isdisjoint({threading.get_ident()})
    assert len(runner.threads) == 1


def test_layers_are_pushed_on_the_step_thread_in_order_before_the_end_of_their_step() -> None:
    log: list[str] = []
    threads: set[int] = set()

    def perform(effect: str) -> None:
        threads.add(threading.get_ident())
        log.append(effect)

    flow = ScriptedFlow(log, [1, 1])
    flow.next_pushes = Pushes(["push a"], lambda layer: [f"push b {layer}"])
    loop = loop_over(ScriptedRunner([], RuntimeError("boom")), flow, perform=perform)
    loop.turn()
    loop.turn()
    loop.turn()
    pushed = [event for event in log if event.split()[0] in ("push", "fail", "end")]
    once = ["push a", "push b 0", "push b 1"]
    assert pushed == [*once[:1], *once[1:], "fail 1 of boom", *once, "end 1"]
    assert threads == {threading.get_ident()}


def test_blocks_are_swapped_and_messages_handled_only_while_no_step_runs() -> None:
    runner = GatedRunner()

    class Watching(ScriptedFlow):
        def on_message(self, message: str, now_s: float) -> list[str]:
            assert runner.num_running == 0
            return []

        def on_time(self, now_s: float) -> list[str]:
            assert runner.num_running == 0
            return []

    flow = Watching([], [1, 1, 1])
    flow.swap_outs = [BlockCopy([1], [8])]
    loop = loop_over(runner, flow, ["a"], ["b"], ["c"], perform=lambda _: None)
    for _ in range(3):
        runner.may_end.release()
        loop.turn()
    loop.turn()
    assert flow.log.count("end 1") == 3


@pytest.mark.parametrize("is_partly", [False, True])
def test_a_failing_step_fails_its_sequences_and_the_next_step_runs(
    is_partly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    flow = ScriptedFlow(log, [3, 1])
    error: Exception = RuntimeError("boom")
    if is_partly:
        error = SequencesFailed({1: InternalError("boom")}, RunnerResult([None] * 3))
    loop = make_loop(ScriptedInbox(), flow, error, is_async=True)
    with caplog.at_level(logging.CRITICAL, "pdserve.engine"):
        for _ in range(3):
            loop.turn()
    ends = [event for event in log if event.split()[0] in ("end", "fail")]
    assert ends == [*(["end 2", "fail 1 of boom"] if is_partly else ["fail 3 of boom"]), "end 1"]


def test_the_time_of_a_step_is_that_of_the_runner() -> None:
    clock = ManualClock(5.0)

    took: list[float] = []

    class Timed(ScriptedFlow):
        def end_step(self, step: PlannedStep, results: RunnerResult, now_s: float) -> None:
            took.append(step.took_s)

    loop = StepLoop(
        inbox=ScriptedInbox(), flow=Timed([], [1]), runner=SlowRunner(clock),
        perform=lambda _: None, flush=lambda: None, clock=clock, is_async=True,
    )  # fmt: skip
    loop.turn()
    loop.turn()
    assert took == [0.25]


def test_a_step_under_way_is_ended_and_reported_before_a_stop() -> None:
    log: list[str] = []
    before = threading.active_count()
    inbox = ScriptedInbox([])

    class Closing(ScriptedFlow):
        def plan_ahead(self, step: PlannedStep) -> None:
            inbox.is_closed = True

    make_loop(inbox, Closing(log, [1]), is_async=True).run()
    assert log[-5:] == ["end 1", "stop", "effect of end 1", "effect of stop", "flush"]
    assert threading.active_count() <= before + 1


def test_it_is_busy_while_it_waits_for_a_step() -> None:
    runner = GatedRunner()
    loop = loop_over(runner, ScriptedFlow([], [1]), perform=lambda _: None)
    loop.turn()
    assert runner.has_begun.acquire(timeout=WAIT_S)
    waiting = threading.Thread(target=loop.turn, daemon=True)
    loop.busy_since_s = 0.0
    waiting.start()
    until = time.monotonic() + WAIT_S
    while loop.busy_since_s == 0.0:  # it is set first of all
        assert time.monotonic() < until
    assert loop.busy_since_s == 5.0
    runner.may_end.release()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
