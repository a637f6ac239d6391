"""Steps of nodes that share the cores of one machine: when each of them is done. Pure.

As long as no more steps run than the cores carry, each runs at full speed, or a little slower for
the caches and the memory that it shares with others. More steps than that get equal shares. A step
that begins or ends changes the pace of all others from that moment on.
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
    on_pace: Callable[[], object]


class SharedCores:
    """The steps that run at once on a machine that runs `at_once` of them at full speed.

    A step takes `slowdown` times as long while another one runs, although each has its cores; with
    an `at_once` of 1 there is none that does. No method may be called with a time before the latest
    one.
    """

    def __init__(self, at_once: int, slowdown: float = 1.0) -> None:
        self._at_once = at_once
        self._slowdown = slowdown if at_once > 1 else 1.0
        self._steps: list[PacedStep] = []
        self._moved_at_s = 0.0

    def begin(self, work_s: float, on_pace: Callable[[], object], now_s: float) -> PacedStep:
        """Begin a step that takes so many seconds alone."""
        self._move(now_s)
        step = PacedStep(work_s, work_s, on_pace)
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
        return self._moved_at_s + max(0.0, left_s) / self._pace

    @property
    def _pace(self) -> float:
        """Seconds of work that each step does in a second."""
        num = len(self._steps)
        return min(1.0, self._at_once / num) / (self._slowdown if num > 1 else 1.0)

    def _move(self, now_s: float) -> None:
        if self._steps:
            done_s = (now_s - self._moved_at_s) * self._pace
            for step in self._steps:
                step.left_s -= done_s
        self._moved_at_s = now_s

    def _tell_others(self, step: PacedStep) -> None:
        for other in self._steps:
            if other is not step:
                other.on_pace()
