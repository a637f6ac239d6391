"""Steps of nodes that share the cores of one machine: when each of them is done. Pure.

As long as no more steps run than the cores carry, each runs at full speed, or a little slower for
the caches and the memory that it shares with others. More steps than that get equal shares. A step
that begins or ends changes the pace of all others from that moment on. A step with a prompt is
slowed by other work than one that decodes alone: the one multiplies, the other reads memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class PacedStep:
    """A step under way. `on_pace` is called when another one has changed its end."""

    work_s: float
    """Seconds that all of it takes alone."""
    left_s: float
    slowdown: float
    """How many times as long it takes while another step runs, although each has its cores."""
    on_pace: Callable[[], object]


class SharedCores:
    """The steps that run at once on a machine that runs `at_once` of them at full speed.

    No method may be called with a time before the latest one.
    """

    def __init__(
        self, at_once: int, *, decode_slowdown: float = 1.0, prompt_slowdown: float = 1.0
    ) -> None:
        """Take `PacedStep.slowdown` of both kinds; with an `at_once` of 1 there is none."""
        self._at_once = at_once
        self._slowdowns = (decode_slowdown, prompt_slowdown) if at_once > 1 else (1.0, 1.0)
        self._steps: list[PacedStep] = []
        self._moved_at_s = 0.0

    def begin(
        self,
        work_s: float,
        on_pace: Callable[[], object],
        now_s: float,
        *,
        computes_prompts: bool = False,
    ) -> PacedStep:
        """Begin a step that takes so many seconds alone."""
        self._move(now_s)
        step = PacedStep(work_s, work_s, self._slowdowns[computes_prompts], on_pace)
        self._steps.append(step)
        self._tell_others(step)
        return step

    def end(self, step: PacedStep, now_s: float) -> None:
        """End a step, also one that has work left."""
        self._move(now_s)
        self._steps.remove(step)
        self._tell_others(step)

    def done_at_s(self, step: PacedStep, share: float = 1.0) -> float:
        """Return when so much of a step's work is done, if no other one begins or ends before."""
        left_s = step.left_s - (1 - share) * step.work_s
        return self._moved_at_s + max(0.0, left_s) / self._pace(step)

    def _pace(self, step: PacedStep) -> float:
        """Return the seconds of work that a step does in a second."""
        num = len(self._steps)
        return min(1.0, self._at_once / num) / (step.slowdown if num > 1 else 1.0)

    def _move(self, now_s: float) -> None:
        if self._steps:
            for step in self._steps:
                step.left_s -= (now_s - self._moved_at_s) * self._pace(step)
        self._moved_at_s = now_s

    def _tell_others(self, step: PacedStep) -> None:
        for other in self._steps:
            if other is not step:
                other.on_pace()
