"""Where steps are executed: on the calling thread, or on a thread of their own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from common.clock import Clock
from engine.core.plan import DrawnTokens, OnLayer, Runner, ScheduledSequence

Batch = Sequence[ScheduledSequence]
Results = list[DrawnTokens | None]


class Execution(Protocol):
    """Executes one step at a time: `begin`, then `wait`.

    Between the two nobody else may use the runner, and nobody may change what the batch reads.
    """

    is_beside: bool
    """Whether a step runs between `begin` and `wait`, beside the calling thread."""

    def begin(self, batch: Batch, *, reports_layers: bool) -> None:
        """Begin a step. With `reports_layers`, `wait` is told about its layers."""

    def wait(self, on_layer: OnLayer | None) -> tuple[Results, float]:
        """Return the step's results, and how many seconds the runner took.

        `on_layer` is called on this thread, for each layer that can be sent. Raises what the runner
        raised.
        """

    def close(self) -> None:
        """End the thread, if there is one, when the step under way has ended."""


class ExecutionHere:
    """Executes a step in `wait`, on the calling thread."""

    is_beside = False

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._batch: Batch = ()

    def begin(self, batch: Batch, *, reports_layers: bool) -> None:
        self._batch = batch

    def wait(self, on_layer: OnLayer | None) -> tuple[Results, float]:
        batch, self._batch = self._batch, ()
        began_s = self._clock.now_s()
        results = self._runner.execute(batch, on_layer)
        return results, self._clock.now_s() - began_s

    def close(self) -> None:
        """Do nothing: there is no thread."""


@dataclass(frozen=True, slots=True)
class _Job:
    batch: Batch
    reports_layers: bool


@dataclass(frozen=True, slots=True)
class _End:
    results: Results
    error: BaseException | None
    took_s: float


_Jobs = SimpleQueue[_Job | None]
_Events = SimpleQueue[int | _End]
"""The numbers of layers that can be sent, then the end of the step."""


class ExecutionThread:
    """Executes steps on a thread of its own, which ends with `close` or with this object.

    It is a daemon: a step that hangs does not keep the process alive.
    """

    is_beside = True

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._jobs: _Jobs = SimpleQueue()
        self._events: _Events = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, batch: Batch, *, reports_layers: bool) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_execute_all,
                args=(self._runner, self._clock, self._jobs, self._events),
                name="pdserve-runner",
                daemon=True,
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(_Job(batch, reports_layers))

    def wait(self, on_layer: OnLayer | None) -> tuple[Results, float]:
        while not isinstance(event := self._events.get(), _End):
            if on_layer is not None:
                on_layer(event)
        if event.error is not None:
            raise event.error
        return event.results, event.took_s

    def close(self) -> None:
        self._jobs.put(None)
        self._thread = None


def _execute_all(runner: Runner, clock: Clock, jobs: _Jobs, events: _Events) -> None:
    while (job := jobs.get()) is not None:
        began_s = clock.now_s()
        results: Results = []
        error: BaseException | None = None
        try:
            results = runner.execute(job.batch, events.put if job.reports_layers else None)
        except BaseException as one:
            error = one
        events.put(_End(results, error, clock.now_s() - began_s))
        del job, results, error
