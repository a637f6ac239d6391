"""The order of things in a turn, when the loop sleeps, and what a failing runner costs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

import pytest

from common.errors import InternalError, InvalidRequest, PdserveError
from engine.core.blocks.block_pool import BlockCounts
from engine.core.planner_contract import StopRule
from engine.core.runner_contract import (
    DeviceLost,
    OnLayer,
    RunnerResult,
    ScheduledSequence,
    SequencesFailed,
)
from engine.core.step.step_in_flight import BlockCopy, PlannedStep, Preempted, Pushes
from engine.step_loop import StepLoop, start_step_thread
from tests.support.clocks.manual_clock import ManualClock
from tests.support.engine.scripted_loop import (
    ScriptedFlow,
    ScriptedInbox,
    ScriptedRunner,
    SlowRunner,
    make_loop,
)


@pytest.mark.covers("S12")
def test_a_turn_is_messages_time_plan_run_apply_emit_each_performed_before_the_next() -> None:
    log: list[str] = []
    flow = ScriptedFlow(log, [2])
    assert make_loop(ScriptedInbox(["m1", "m2"]), flow, at_s=5.0).turn()
    assert log == [
        *("m1", "effect of m1"),
        *("m2", "effect of m2"),
        *("time 5", "effect of time 5"),
        *("begin", "effect of begin"),
        "run",
        *("end 2", "effect of end 2"),
        "flush",
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_others_see_changes_before_anybody_is_told(is_async: bool) -> None:
    log: list[str] = []
    loop = StepLoop(
        inbox=ScriptedInbox(), flow=ScriptedFlow(log, [2]), runner=ScriptedRunner(log),
        perform=log.append, publish=lambda: log.append("publish"), flush=lambda: None,
        clock=ManualClock(), is_async=is_async,
    )  # fmt: skip
    while loop.turn():
        pass
    for effect in ("effect of begin", "effect of end 2"):
        assert log[log.index(effect) - 1] == "publish"
    told = log.index("effect of end 2")
    assert "publish" not in log[told + 1 : log.index("begin", told)], "nothing has changed"


class _Executed:
    """Has the results of a step when it is asked for them; it plans nothing meanwhile."""

    is_beside, plans_ahead = True, False

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def begin(self, batch: Sequence[ScheduledSequence], on_layer: OnLayer | None) -> None:
        self.log.append(f"begin {len(batch)}")

    def wait_until_queued(self) -> None:
        self.log.append("queued")

    def wait(self) -> tuple[RunnerResult, float]:
        return RunnerResult([None, None]), 0.5

    def close(self) -> None:
        """Have nothing to close."""


def test_steps_run_where_the_loop_is_told_and_the_next_turn_takes_their_results() -> None:
    log: list[str] = []
    loop = StepLoop(
        inbox=ScriptedInbox(["m1"]), flow=ScriptedFlow(log, [2]), runner=ScriptedRunner(log),
        perform=log.append, flush=lambda: log.append("flush"), clock=ManualClock(),
        execution=_Executed(log),
    )  # fmt: skip
    assert loop.turn()
    begun = log.index("effect of begin") + 1
    assert log[begun:] == ["begin 2", "queued", "flush"]  # neither "run" nor "plan ahead"
    log.clear()
    assert loop.turn()
    assert (log[0], log[-2:]) == ("end 2", ["effect of end 2", "flush"])
    assert not loop.turn()


def test_what_leaves_with_a_step_leaves_before_it_and_layer_by_layer_within_it() -> None:
    log: list[str] = []
    flow = ScriptedFlow(log, [1, 1])
    flow.next_pushes = Pushes(["push a", "push b"], lambda layer: [f"push c {layer}"])
    loop = make_loop(ScriptedInbox(), flow, RuntimeError("boom"))
    assert loop.turn()
    pushed = ["push a", "push b", "run", "layer 0", "push c 0", "layer 1", "push c 1"]
    begun = log.index("effect of begin") + 1
    assert log[begun : begun + 8] == [*pushed, "fail 1 of boom"]
    flow.next_pushes = Pushes(["push a"], None)
    log.clear()
    assert loop.turn()
    begun = log.index("effect of begin") + 1
    assert log[begun : begun + 3] == ["push a", "run", "end 1"]


def test_a_step_says_how_long_the_runner_took_unless_it_failed() -> None:
    clock = ManualClock(5.0)

    class Timed(ScriptedFlow):
        def end_step(self, step: PlannedStep, results: RunnerResult, now_s: float) -> None:
            self.log.append(f"end after {step.took_s:g} at {now_s:g}")

    log: list[str] = []
    partly = SequencesFailed({1: InternalError("boom")}, RunnerResult([None] * 2))
    for error in (None, partly):
        loop = StepLoop(
            inbox=ScriptedInbox(), flow=Timed(log, [2]), runner=SlowRunner(clock, log, error),
            perform=lambda _: None, flush=lambda: None, clock=clock,
        )  # fmt: skip
        assert loop.turn()
    ends = [event for event in log if event.startswith("end")]
    assert ends == ["end after 0.25 at 5.25", "end after 0 at 5.5"]


def test_what_a_step_preempts_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdserve.engine")
    flow = ScriptedFlow([], [1, 1])
    blocks = BlockCounts(free=0, cached=0, running=1, reserved=0, receiving=0, quarantined=0)
    flow.preempted = Preempted(1, 0, 5, 0.1, 0.2, blocks, 1, 1)
    loop = make_loop(ScriptedInbox(), flow, at_s=5.0)
    assert loop.turn()
    assert loop.turn()
    (line,) = caplog.messages
    assert line.startswith("preempted 1 sequences")


def test_blocks_leave_before_others_come_back_and_both_before_anything_is_written() -> None:
    # An effect may let another node write into blocks that were just swapped out.
    log: list[str] = []
    flow = ScriptedFlow(log, [1])
    flow.swap_outs = [BlockCopy([1, 2], [8, 9]), BlockCopy([3], [7])]
    flow.swap_ins = [BlockCopy([1, 2], [5, 6])]
    assert make_loop(ScriptedInbox(), flow).turn()
    assert log[log.index("begin") + 1 : log.index("run")] == [
        "out [1, 2] to [8, 9]",
        "out [3] to [7]",
        "in [5, 6] to [1, 2]",
        "effect of begin",
    ]


def test_blocks_move_in_a_step_that_computes_nothing_too() -> None:
    log: list[str] = []
    flow = ScriptedFlow(log, [])
    flow.swap_outs, flow.num_preempted = [BlockCopy([1], [8])], 1
    assert make_loop(ScriptedInbox(), flow).turn()
    assert "out [1] to [8]" in log
    assert "run" not in log


def test_sequences_without_a_result_fail_alone() -> None:
    log: list[str] = []
    flow = ScriptedFlow(log, [3])
    error = SequencesFailed({1: InternalError("not finite")}, RunnerResult([None] * 3))
    assert make_loop(ScriptedInbox(), flow, error).turn()
    after_run = log[log.index("run") + 1 :]
    ends = ["end 2", "fail 1 of not finite"]
    assert after_run[:4] == [*ends, *(f"effect of {one}" for one in ends)]


def test_a_lost_device_ends_the_loop_and_fails_nobody() -> None:
    """Its requests go on at another node, as after a node's death."""
    log: list[str] = []
    loop = make_loop(ScriptedInbox(), ScriptedFlow(log, [3]), DeviceLost("illegal address (700)"))
    with pytest.raises(DeviceLost, match="700"):
        loop.turn()
    assert not [one for one in log if one.startswith(("fail", "end"))]


@pytest.mark.parametrize(
    ("second", "level"), [(InvalidRequest("no token"), "INFO"), (InternalError("NaN"), "ERROR")]
)
def test_each_sequence_without_a_result_fails_with_its_own_error(
    second: PdserveError, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a client asked for is no error of the server's log."""
    caplog.set_level(logging.INFO, logger="pdserve.engine")
    log: list[str] = []
    error = SequencesFailed({0: InvalidRequest("no token"), 2: second}, RunnerResult([None] * 3))
    assert make_loop(ScriptedInbox(), ScriptedFlow(log, [3]), error).turn()
    fails = [one for one in log if one.startswith("fail")]
    assert fails == ["fail 1 of no token", f"fail 1 of {second}"]
    assert [record.levelname for record in caplog.records] == [level]


def test_a_turn_without_a_batch_does_not_run_and_is_idle() -> None:
    log: list[str] = []
    assert not make_loop(ScriptedInbox(["m"]), ScriptedFlow(log, [])).turn()
    assert "run" not in log
    assert log[-1] == "flush"


def test_a_turn_that_only_preempted_is_not_idle() -> None:
    flow = ScriptedFlow([], [])
    flow.num_preempted = 1
    assert make_loop(ScriptedInbox(), flow).turn()


@pytest.mark.parametrize(
    ("deadline_s", "at_s", "timeout_s"),
    [(None, 3.0, None), (10.0, 3.0, 7.0), (3.0, 3.0, 0.0), (1.0, 3.0, 0.0)],
)
def test_an_idle_loop_waits_until_the_next_deadline(
    deadline_s: float | None, at_s: float, timeout_s: float | None
) -> None:
    inbox = ScriptedInbox([])
    make_loop(inbox, ScriptedFlow([], [], deadline_s), at_s=at_s).run()
    assert inbox.timeouts == [timeout_s]


def test_a_busy_loop_does_not_wait() -> None:
    log: list[str] = []
    inbox = ScriptedInbox([], [], [])
    make_loop(inbox, ScriptedFlow(log, [1, 1, 1])).run()
    assert log.count("run") == 3
    assert len(inbox.timeouts) == 1


def test_a_closed_inbox_stops_the_loop_and_everybody_is_told_and_flushed() -> None:
    log: list[str] = []
    make_loop(ScriptedInbox(["m"]), ScriptedFlow(log, [])).run()
    assert log[-3:] == ["stop", "effect of stop", "flush"]
    assert log.count("stop") == 1


def test_a_failing_runner_fails_its_batch_and_the_loop_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    inbox = ScriptedInbox(["a"], ["b"])
    with caplog.at_level(logging.CRITICAL, "pdserve.engine"):
        make_loop(inbox, ScriptedFlow(log, [1, 1]), RuntimeError("out of memory")).run()
    assert log.index("fail 1 of out of memory") < log.index("b") < log.index("end 1")
    assert "effect of fail 1 of out of memory" in log


class BrokenFlow(ScriptedFlow):
    def on_message(self, message: str, now_s: float) -> Iterable[str]:
        raise KeyError(message)


@pytest.mark.covers("F71")
def test_a_bug_in_the_flow_ends_the_thread_and_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crashed = threading.Event()
    with caplog.at_level(logging.CRITICAL, "pdserve.engine"):
        loop = make_loop(ScriptedInbox(["m"]), BrokenFlow([], []))
        thread = start_step_thread(loop, crashed.set)
        thread.join(10)
    assert not thread.is_alive()
    assert crashed.is_set()


def test_an_exit_within_the_loop_is_reported_too(caplog: pytest.LogCaptureFixture) -> None:
    """A thread that `SystemExit` ends logs nothing; the node would end at the stall limit only."""

    class ExitingFlow(ScriptedFlow):
        def on_message(self, message: str, now_s: float) -> Iterable[str]:
            raise SystemExit(3)

    crashed = threading.Event()
    with caplog.at_level(logging.CRITICAL, "pdserve.engine"):
        loop = make_loop(ScriptedInbox(["m"]), ExitingFlow([], []))
        thread = start_step_thread(loop, crashed.set)
        thread.join(10)
    assert not thread.is_alive()
    assert crashed.is_set()


def test_a_thread_that_ends_well_reports_no_crash() -> None:
    crashed = threading.Event()
    thread = start_step_thread(make_loop(ScriptedInbox(["m"]), ScriptedFlow([], [])), crashed.set)
    thread.join(10)
    assert not thread.is_alive()
    assert not crashed.is_set()


def test_it_is_busy_from_the_beginning_of_a_turn_until_it_waits() -> None:
    seen: list[float | None] = []

    class WatchingInbox(ScriptedInbox):
        def take_all(self) -> list[str]:
            seen.append(loop.busy_since_s)
            return super().take_all()

        def wait(self, timeout_s: float | None) -> None:
            seen.append(loop.busy_since_s)
            super().wait(timeout_s)

    loop = make_loop(WatchingInbox(["a"], ["b"]), ScriptedFlow([], []), at_s=5.0)
    loop.run()
    assert seen == [5.0, None, 5.0, None, 5.0]


@pytest.mark.covers("S58")
def test_each_plan_can_be_logged_with_the_rule_that_stopped_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    with caplog.at_level(logging.DEBUG, logger="pdserve.engine"):
        make_loop(ScriptedInbox(), ScriptedFlow(log, [2])).turn()
    assert "a step of 2 sequences" in caplog.text
    assert f"ended by: {StopRule.NOTHING_WAITS.value}" in caplog.text
