"""Executing a step here or on a thread: the same results, the same errors, and no thread left."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.runner_contract import (
    DrawnTokens,
    OnLayer,
    OnQueued,
    RunnerResult,
    ScheduledSequence,
)
from engine.core.step.step_batch import batch_of
from engine.execution import Execution, ExecutionHere, ExecutionThread
from tests.support.clocks.manual_clock import ManualClock

WAIT_S = 20.0
ENTRY = ScheduledSequence(1, [1], 0, [0], None)


class Runner:
    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.error: BaseException | None = None
        self.threads: list[threading.Thread] = []
        self.may_go_on = threading.Semaphore(100)

    def execute(
        self,
        batch: Sequence[ScheduledSequence],
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        self.threads.append(threading.current_thread())
        self.clock.advance(2.0)
        if on_layer is not None:
            on_layer(0)
        if on_queued is not None:
            on_queued()
        assert self.may_go_on.acquire(timeout=WAIT_S)
        if on_layer is not None:
            on_layer(1)
        if self.error is not None:
            raise self.error
        return RunnerResult([DrawnTokens((len(batch),))])

    def swap_out(self, *_: Any) -> None: ...
    def swap_in(self, *_: Any) -> None: ...


@pytest.mark.parametrize("kind", [ExecutionHere, ExecutionThread])
def test_results_layers_and_errors_come_from_wait(kind: Any) -> None:
    runner = Runner(ManualClock())
    execution: Execution = kind(runner, runner.clock)
    told: list[tuple[int, threading.Thread]] = []

    def on_layer(layer: int) -> None:
        told.append((layer, threading.current_thread()))

    for on_this in (on_layer, None):
        execution.begin(batch_of([ENTRY, ENTRY]), on_this)
        execution.wait_until_queued()
        assert execution.wait() == ([DrawnTokens((2,))], 2.0)
    me = threading.current_thread()
    assert told == [(0, me), (1, me)]
    runner.error = RuntimeError("boom")
    execution.begin(batch_of([ENTRY]), on_layer)
    with pytest.raises(RuntimeError, match="boom"):
        execution.wait()
    assert [layer for layer, _ in told] == [0, 1, 0, 1]
    execution.close()


@pytest.mark.parametrize("kind", [ExecutionHere, ExecutionThread])
def test_a_layer_that_cannot_be_sent_fails_its_step_and_no_other(kind: Any) -> None:
    """The step runs to its end before anyone else may use the runner."""
    runner = Runner(ManualClock())
    execution: Execution = kind(runner, runner.clock)
    told: list[int] = []

    def on_layer(layer: int) -> None:
        told.append(layer)
        raise ValueError("no such lease")

    execution.begin(batch_of([ENTRY]), on_layer)
    execution.wait_until_queued()
    with pytest.raises(ValueError, match="no such lease"):
        execution.wait()
    assert told == [0]
    execution.begin(batch_of([ENTRY, ENTRY]), None)
    execution.wait_until_queued()
    assert execution.wait()[0] == [DrawnTokens((2,))]
    execution.close()


def test_waiting_until_it_is_queued_tells_of_layers_before_and_ends_before_the_step() -> None:
    runner = Runner(ManualClock())
    runner.may_go_on = threading.Semaphore(0)
    execution = ExecutionThread(runner, runner.clock)
    told: list[int] = []
    execution.begin(batch_of([ENTRY]), told.append)
    execution.wait_until_queued()
    assert told == [0]
    runner.may_go_on.release()
    assert execution.wait()[0]
    assert told == [0, 1]
    execution.close()


def test_a_step_that_fails_before_it_is_queued_is_not_waited_for_any_longer() -> None:
    class Failing(Runner):
        def execute(self, *_: Any) -> RunnerResult:
            raise RuntimeError("boom")

    execution = ExecutionThread(Failing(ManualClock()), ManualClock())
    execution.begin(batch_of([ENTRY]), None)
    execution.wait_until_queued()
    with pytest.raises(RuntimeError, match="boom"):
        execution.wait()
    execution.close()


def test_all_steps_run_on_one_other_thread_which_ends_with_close_and_can_begin_again() -> None:
    runner = Runner(ManualClock())
    execution = ExecutionThread(runner, runner.clock)
    for _ in range(3):
        execution.begin(batch_of([ENTRY]), None)
        execution.wait()
    (thread,) = set(runner.threads)
    assert thread is not threading.current_thread()
    assert thread.daemon, "a step that hangs keeps the process alive"
    execution.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    execution.begin(batch_of([ENTRY]), None)
    assert execution.wait()[0]
    execution.close()


def test_a_thread_whose_execution_is_forgotten_ends() -> None:
    runner = Runner(ManualClock())
    execution = ExecutionThread(runner, runner.clock)
    execution.begin(batch_of([ENTRY]), None)
    execution.wait()
    del execution  # the last reference: nothing waits for the garbage collector
    until = time.monotonic() + WAIT_S
    while runner.threads[0].is_alive():
        assert time.monotonic() < until


def test_an_exit_within_a_step_reaches_the_waiting_thread() -> None:
    runner = Runner(ManualClock())
    runner.error = SystemExit(3)
    execution = ExecutionThread(runner, runner.clock)
    execution.begin(batch_of([ENTRY]), None)
    with pytest.raises(SystemExit):
        execution.wait()
    execution.close()
