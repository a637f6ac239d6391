"""A step that hangs while the rest of the process goes on, and how the node reports it."""

from __future__ import annotations

from node.flow.step_progress import TICK_S, StepProgress
from simulator.faults.hosts import ProcessClock
from simulator.faults.node.steps import ComputedExecution


class HungSteps:
    """The hangs of one node. The real `StepProgress` measures them, from their begin on."""

    def __init__(self, clock: ProcessClock, steps: ComputedExecution, expected_s: float) -> None:
        self._clock, self._steps = clock, steps
        self._progress = StepProgress(expected_s)
        self._is_watched = False

    @property
    def stuck_s(self) -> float:
        """How long the present step has lasted, if the node says that it makes no progress."""
        return self._progress.stuck_s if self._steps.is_running else 0.0

    def hang(self, span_s: float) -> None:
        """Delay the end of the step that runs, or of the next one, by `span_s`."""
        self._steps.hang(self._clock.now_s() + span_s)
        if not self._is_watched:
            self._is_watched = True
            self._look()

    def _look(self) -> None:
        steps = self._steps
        self._progress.look(steps.began_s if steps.is_running else None)
        self._is_watched = self._clock.now_s() < steps.hangs_until_s or self.stuck_s > 0
        if self._is_watched:
            self._clock.after(TICK_S, self._look)
