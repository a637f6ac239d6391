"""Where steps are executed: on the calling thread, or on a thread of their own."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from common.observing.clock import Clock
from engine.core.runner_contract import OnLayer, RunnerResult
from engine.core.step.runner import Runner
from engine.core.step.step_batch import EMPTY_BATCH, StepBatch


class Execution(Protocol):
    """Executes one step at a time: `begin`, `wait_until_queued` if that matters, then `wait`.

    From `begin` until `wait` returns nobody else may use the runner, and nobody may change what the
    batch reads. `wait` calls the `on_layer` of `begin` on its own thread, and so does
    `wait_until_queued`. After an error of `on_layer` it is called no more, and `wait` raises the
    error.
    """

    is_beside: bool
    """Whether a step runs from `begin` on, beside the calling thread."""
    plans_ahead: bool
    """Whether the next step is planned while one runs."""

    def begin(self, batch: StepBatch, on_layer: OnLayer | None) -> None:
        """Begin a step."""

    def wait_until_queued(self) -> None:
        """Return when the step needs the interpreter only now and then, or has ended."""

    def wait(self) -> tuple[RunnerResult, float]:
        """Return the step's results, and how many seconds the runner took.

        Raises what the runner or `on_layer` raised.
        """

    def close(self) -> None:
        """End the thread, if there is one, when the step under way has ended."""


class ExecutionHere:
    """Executes a step in `wait`, on the calling thread."""

    is_beside = plans_ahead = False

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._batch = EMPTY_BATCH
        self._on_layer: OnLayer | None = None

    def begin(self, batch: StepBatch, on_layer: OnLayer | None) -> None:
        self._batch, self._on_layer = batch, on_layer

    def wait_until_queued(self) -> None:
        """Return at once: the step has not begun."""

    def wait(self) -> tuple[RunnerResult, float]:
        batch, self._batch = self._batch, EMPTY_BATCH
        began_s = self._clock.now_s()
        results = self._runner.execute(batch, self._on_layer)
        return results, self._clock.now_s() - began_s

    def close(self) -> None:
        """Do nothing: there is no thread."""


@dataclass(frozen=True, slots=True)
class _Job:
    batch: StepBatch
    reports_layers: bool


@dataclass(frozen=True, slots=True)
class _End:
    results: RunnerResult
    error: BaseException | None
    took_s: float


_QUEUED = -1
_Jobs = SimpleQueue[_Job | None]
_Events = SimpleQueue[int | _End]
"""Layers that can be sent, by number, and _QUEUED, in the order of their calls; then the end."""


class ExecutionThread:
    """Executes steps on a thread of its own, which ends with `close` or with this object.

    It is a daemon: a step that hangs does not keep the process alive.
    """

    is_beside = plans_ahead = True

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._jobs: _Jobs = SimpleQueue()
        self._events: _Events = SimpleQueue()
        self._on_layer: OnLayer | None = None
        self._layer_error: Exception | None = None
        self._end: _End | None = None
        self._thread: threading.Thread | None = None

    def begin(self, batch: StepBatch, on_layer: OnLayer | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_execute_all,
                args=(self._runner, self._clock, self._jobs, self._events),
                name="pdserve-runner",
                daemon=True,
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._on_layer = on_layer
        self._jobs.put(_Job(batch, on_layer is not None))

    def wait_until_queued(self) -> None:
        while self._end is None and self._next_event() != _QUEUED:
            pass

    def wait(self) -> tuple[RunnerResult, float]:
        while self._end is None:
            self._next_event()
        end, self._end = self._end, None
        error, self._layer_error = self._layer_error or end.error, None
        if error is not None:
            raise error
        return end.results, end.took_s

    def close(self) -> None:
        self._jobs.put(None)
        self._thread = None

    def _next_event(self) -> int | None:
        """Handle the next event; return its number if it is not the end of the step."""
        event = self._events.get()
        if isinstance(event, _End):
            self._end = event
            return None
        if event != _QUEUED and self._on_layer is not None:
            try:
                self._on_layer(event)
            except Exception as error:
                # Kept until the step has ended: its results must not be taken for the next one's.
                self._layer_error, self._on_layer = error, None
        return event


def _execute_all(runner: Runner, clock: Clock, jobs: _Jobs, events: _Events) -> None:
    while (job := jobs.get()) is not None:
        began_s = clock.now_s()
        results = RunnerResult()
        error: BaseException | None = None
        on_layer = events.put if job.reports_layers else None
        try:
            results = runner.execute(job.batch, on_layer, lambda: events.put(_QUEUED))
        except BaseException as one:
            error = one
        events.put(_End(results, error, clock.now_s() - began_s))
        del job, results, error
