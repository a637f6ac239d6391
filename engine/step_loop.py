"""The step thread: drain the inbox, plan, run (and send what was computed), apply, emit.

The scheduler belongs to this thread alone. So scheduling needs no lock, and a run can be replayed
from its messages. The effects of a message are performed before the next message is read: a landing
is closed before its blocks can be allocated again.

A step may run on a thread of its own, across the end of a turn. While it runs nothing changes the
scheduler, so the running step can read it: as soon as the step needs little of the interpreter,
this thread reports the step before and decides, without taking anything, what the next step could
run. The next turn applies the results first, and handles messages and deadlines; only then the next
step takes what it needs and begins. The runner may have begun it already, if the plan of the step
before offered it (`core/planning/going_on.py`): then its sequences are those that are left of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from common.errors import InvalidRequest
from common.observing.clock import Clock
from engine.core.runner_contract import (
    DeviceLost,
    OnLayer,
    RunnerResult,
    SequencesFailed,
)
from engine.core.step.runner import Runner
from engine.core.step.step_in_flight import PlannedStep, Pushes
from engine.execution import Execution, ExecutionHere, ExecutionThread
from engine.preemption_log import PreemptionLog

log = logging.getLogger("pdserve.engine")

M = TypeVar("M")
E_co = TypeVar("E_co", covariant=True)
M_contra = TypeVar("M_contra", contravariant=True)
E = TypeVar("E")


class StepInbox(Protocol[M]):
    """The queue of messages to the step thread."""

    def take_all(self) -> list[M]: ...
    def wait(self, timeout_s: float | None) -> None: ...
    @property
    def is_closed(self) -> bool: ...


class Flow(Protocol[M_contra, E_co]):
    """A node's decisions: events in, effects out.

    `end_step` records the results of a step, and `report` returns the effects that tell of them,
    once. Any other event returns them too, before its own ones, where the order matters.
    """

    def on_message(self, message: M_contra, now_s: float) -> Iterable[E_co]: ...
    def on_time(self, now_s: float) -> Iterable[E_co]: ...
    def next_deadline_s(self) -> float | None: ...
    def begin_step(self, now_s: float) -> tuple[PlannedStep, Iterable[E_co]]: ...
    def pushes(self, step: PlannedStep) -> Pushes[E_co] | None: ...
    def plan_ahead(self, step: PlannedStep) -> None: ...
    def end_step(self, step: PlannedStep, results: RunnerResult, now_s: float) -> None: ...
    def report(self) -> Iterable[E_co]: ...
    def fail_step(self, step: PlannedStep, error: Exception, now_s: float) -> Iterable[E_co]: ...
    def on_stop(self) -> Iterable[E_co]: ...


class StepLoop(Generic[M, E]):
    """Runs `flow` and `runner` until the inbox is closed.

    With `is_async`, steps run on a thread of their own, and the next one is planned meanwhile. An
    `execution` that is given executes them instead, and the runner only swaps.
    `perform` carries out one effect and must not block. `publish` is called when a step has taken
    what it needs, and when results are known, before the effects that tell of either. `flush`
    is called after the effects that report a step, and at the end of each turn, so that a step's
    tokens are sent together.
    """

    def __init__(
        self,
        *,
        inbox: StepInbox[M],
        flow: Flow[M, E],
        runner: Runner,
        perform: Callable[[E], None],
        flush: Callable[[], None],
        clock: Clock,
        publish: Callable[[], None] | None = None,
        is_async: bool = False,
        execution: Execution | None = None,
    ) -> None:
        self._inbox = inbox
        self._flow = flow
        self._runner = runner
        of_runner = ExecutionThread if is_async else ExecutionHere
        self._execution: Execution = execution or of_runner(runner, clock)
        self._under_way: PlannedStep | None = None
        self._perform = perform
        self._publish = publish or (lambda: None)
        self._flush = flush
        self._clock = clock
        self._preemptions = PreemptionLog()
        # Start of the current turn; None while the thread waits for messages. Any thread may read
        # it.
        self.busy_since_s: float | None = None

    def run(self) -> None:
        """Run turns until the inbox is closed. An exception here is a bug and ends the process."""
        is_idle = False
        while not self._inbox.is_closed:
            if is_idle:
                self.busy_since_s = None
                self._inbox.wait(self._idle_timeout_s())
            is_idle = not self.turn()
        self._end_step()
        self._perform_all(self._flow.on_stop())
        self._flush()
        self._execution.close()

    def abandon(self) -> None:
        """Perform and flush nothing any more, on any thread: what that would use is closed next."""
        self._perform = _drop
        self._flush = _drop

    def turn(self) -> bool:
        """Run one turn; return False if only a message or a deadline can change anything."""
        self.busy_since_s = self._clock.now_s()
        has_ended = self._end_step()
        for message in self._inbox.take_all():
            self._perform_all(self._flow.on_message(message, self._clock.now_s()))
        self._perform_all(self._flow.on_time(self._clock.now_s()))
        began_s = self._clock.now_s()
        step, effects = self._flow.begin_step(began_s)
        self._publish()
        self._preemptions.on_step(step.preempted, began_s)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "a step of %d sequences, %d tokens, %d preempted; admissions ended by: %s",
                *(len(step.batch), step.num_tokens, step.num_preempted, step.stopped_by.value),
            )
        self._swap(step)
        self._perform_all(effects)
        if step.batch:
            if self._execution.is_beside and step.num_tokens > len(step.batch):
                # A step with prompts is long, even the part until it is queued.
                self._report()
            self._begin_step(step)
        self._report()
        if self._under_way is not None and self._execution.plans_ahead:
            self._flow.plan_ahead(step)
        return step.made_progress or has_ended

    def _swap(self, step: PlannedStep) -> None:
        """Copy swapped blocks, before any other effect of the step.

        Blocks that are swapped out already belong to other sequences, which may compute into them
        or receive KV from another node. An error here is a bug and ends the loop, because the
        sequence would resume on wrong KV.
        """
        for copy in step.swap_outs:
            self._runner.swap_out(copy.block_ids, copy.host_block_ids)
        for copy in step.swap_ins:
            self._runner.swap_in(copy.host_block_ids, copy.block_ids)

    def _begin_step(self, step: PlannedStep) -> None:
        pushes = self._flow.pushes(step)
        of_layer = None
        if pushes is not None:
            self._perform_all(pushes.before)
            of_layer = pushes.of_layer
        on_layer: OnLayer | None = None
        if of_layer is not None:
            on_layer = lambda layer: self._perform_all(of_layer(layer))  # noqa: E731
        self._execution.begin(step.batch, on_layer)
        self._under_way = step
        if self._execution.is_beside:
            # Until then this thread would take the interpreter from the one that begins the step.
            self._execution.wait_until_queued()
        else:
            self._end_step()

    def _end_step(self) -> bool:
        """Wait for the step under way and record its results; return whether there was one.

        Raises `DeviceLost`, which ends the loop: the sequences of the step and all others go on at
        another node, as after any sudden end of this one.
        """
        if self._under_way is None:
            return False
        step, self._under_way = self._under_way, None
        try:
            results, took_s = self._execution.wait()
        except SequencesFailed as some:
            is_ours = any(not isinstance(one, InvalidRequest) for one in some.errors.values())
            log.log(
                logging.ERROR if is_ours else logging.INFO,
                "a step failed for %d of its %d sequences: %s",
                len(some.errors),
                len(step.batch),
                some,
            )
            now_s = self._clock.now_s()
            good = [i for i in range(len(step.batch)) if i not in some.errors]
            self._flow.end_step(step.only(good), some.results.only(good), now_s)
            for entry, error in some.errors.items():
                self._perform_all(self._flow.fail_step(step.only([entry]), error, now_s))
        except DeviceLost:
            raise
        except Exception as error:
            log.exception("a step of %d sequences failed", len(step.batch))
            self._perform_all(self._flow.fail_step(step, error, self._clock.now_s()))
        else:
            step.took_s = took_s
            self._flow.end_step(step, results, self._clock.now_s())
        return True

    def _report(self) -> None:
        if effects := list(self._flow.report()):
            self._publish()
            self._perform_all(effects)
        self._flush()

    def _idle_timeout_s(self) -> float | None:
        deadline_s = self._flow.next_deadline_s()
        return None if deadline_s is None else max(deadline_s - self._clock.now_s(), 0.0)

    def _perform_all(self, effects: Iterable[E]) -> None:
        for effect in effects:
            self._perform(effect)


def _drop(*_: object) -> None:
    """Do nothing with an effect of a loop that was abandoned."""


def start_step_thread(loop: StepLoop[M, E], on_crash: Callable[[], object]) -> threading.Thread:
    """Run `loop` in a new daemon thread, which calls `on_crash` if an exception ends it."""

    def body() -> None:
        try:
            loop.run()
        except BaseException:  # By `SystemExit` a thread ends without a message.
            log.exception("the step loop ended with an exception")
            on_crash()

    thread = threading.Thread(target=body, name="pdserve-step", daemon=True)
    thread.start()
    return thread
