"""Steps beside the turns of a simulated node, on one thread: they go on when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from common.observing.clock import Clock
from engine.core.runner_contract import OnLayer, RunnerResult, ScheduledSequence
from engine.core.step.step_batch import StepBatch
from tests.support.engine.hash_runner import QUEUED, Parts


class PartedRunner(Protocol):
    """A runner whose steps can be stopped at each of their moments."""

    def parts(self, batch: Sequence[ScheduledSequence], *, tells_layers: bool) -> Parts:
        """Execute a batch from one moment to the next; see `HashRunner.parts`."""


class StepsBeside:
    """The `Execution` of a node: steps that end in the turn after the one in which they begin.

    What is computed meanwhile follows from calls of `compute_on` alone, and the rest is computed
    when the node asks for the results. As with a thread, the node is told of layers when it waits.
    """

    is_beside = plans_ahead = True
    is_running = False
    ended_s: Sequence[float] = ()

    def __init__(self, runner: PartedRunner, clock: Clock) -> None:
        self._runner, self._clock = runner, clock
        self._parts: Parts | None = None
        self._untold: deque[int] = deque()
        """Moments that were reached, and of which the node was not told."""
        self._on_layer: OnLayer | None = None
        self._error: Exception | None = None
        self._results = RunnerResult()
        self._began_s = self._took_s = 0.0

    def begin(self, batch: StepBatch, on_layer: OnLayer | None) -> None:
        """Begin a step."""
        self._parts = self._runner.parts(batch, tells_layers=on_layer is not None)
        self._on_layer, self._error = on_layer, None
        self._began_s = self._clock.now_s()

    def compute_on(self) -> None:
        """Compute up to the next moment of the step, or to its end, if one is under way."""
        if self._parts is None:
            return
        try:
            self._untold.append(next(self._parts))
        except StopIteration as end:
            self._end(end.value)
        except Exception as error:
            self._error = self._error or error
            self._end(RunnerResult())

    def wait_until_queued(self) -> None:
        """Compute until the step is queued, or has ended."""
        while self._tell() not in (QUEUED, None):
            pass

    def wait(self) -> tuple[RunnerResult, float]:
        """Compute the rest; return the results, and the time that the step took.

        Raises what the runner has raised, or `on_layer` before that.
        """
        while self._tell() is not None:
            pass
        if self._error is not None:
            raise self._error
        return self._results, self._took_s

    def close(self) -> None:
        """Do nothing: there is no thread."""

    def _tell(self) -> int | None:
        """Tell of the next moment, and return it; None: the step has ended."""
        if not self._untold:
            self.compute_on()
        if not self._untold:
            return None
        moment = self._untold.popleft()
        if moment != QUEUED and self._on_layer is not None:
            try:
                self._on_layer(moment)
            except Exception as error:
                self._error, self._on_layer = error, None
        return moment

    def _end(self, results: RunnerResult) -> None:
        self._parts, self._results = None, results
        self._took_s = self._clock.now_s() - self._began_s
