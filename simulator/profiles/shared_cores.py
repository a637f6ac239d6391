"""Ends of steps of nodes that share the cores of one machine. Pure.

While at most `at_once` steps run, each has its core, and is slowed by the caches and the memory
that it shares with the others. More steps than that get equal shares. A step that begins or ends
changes the pace of all others from that moment on.

The slowdown of a step depends on its kind and on the kinds beside it: a step that decodes alone is
bound by memory, one with a prompt by arithmetic. Beside several steps it is slowed by the mean of
their single slowdowns. On two cores that is exact, as equal shares put each of the others beside it
for as long; the slowdown by several at a time is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Slowdowns(NamedTuple):
    """The ratio of a step's time beside one of another node, each on a core, to its time alone.

    Steps that decode alone are answers, all others prompts.
    """

    answers_beside_answers: float = 1.0
    answers_beside_prompts: float = 1.0
    prompts_beside_answers: float = 1.0
    prompts_beside_prompts: float = 1.0

    def of(self, *, is_prompt: bool, num_answers: int, num_prompts: int) -> float:
        """Return the slowdown of a step beside these numbers of steps; 1 beside none."""
        beside_answers, beside_prompts = self[2:] if is_prompt else self[:2]
        num = num_answers + num_prompts
        if not num:
            return 1.0
        return (num_answers * beside_answers + num_prompts * beside_prompts) / num


NO_SLOWDOWN = Slowdowns()


@dataclass(slots=True)
class PacedStep:
    """A step under way. `on_pace` is called when another one has changed its end."""

    work_s: float
    """Seconds that all of it takes alone."""
    left_s: float
    is_prompt: bool
    on_pace: Callable[[], object]


class SharedCores:
    """The steps that run at once on a machine that runs `at_once` of them at full speed.

    No method may be called with a time before the latest one.
    """

    def __init__(self, at_once: int, slowdowns: Slowdowns = NO_SLOWDOWN) -> None:
        """Begin without a step. With an `at_once` of 1 no step runs beside one: none is slowed."""
        self._at_once = at_once
        self._slowdowns = slowdowns if at_once > 1 else NO_SLOWDOWN
        self._num_prompts = 0
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
        """Begin a step that takes `work_s` seconds alone."""
        self._move(now_s)
        step = PacedStep(work_s, work_s, computes_prompts, on_pace)
        self._steps.append(step)
        self._num_prompts += computes_prompts
        self._tell_others(step)
        return step

    def end(self, step: PacedStep, now_s: float) -> None:
        """End a step, also one that has work left."""
        self._move(now_s)
        self._steps.remove(step)
        self._num_prompts -= step.is_prompt
        self._tell_others(step)

    def done_at_s(self, step: PacedStep, share: float = 1.0) -> float:
        """Return when `share` of a step's work is done, if no other one begins or ends before."""
        left_s = step.left_s - (1 - share) * step.work_s
        return self._moved_at_s + max(0.0, left_s) / self._pace(step)

    def _pace(self, step: PacedStep) -> float:
        """Return the seconds of work that a step does in a second."""
        num, num_prompts = len(self._steps), self._num_prompts - step.is_prompt
        slowdown = self._slowdowns.of(
            is_prompt=step.is_prompt, num_answers=num - 1 - num_prompts, num_prompts=num_prompts
        )
        return min(1.0, self._at_once / num) / slowdown

    def _move(self, now_s: float) -> None:
        if self._steps:
            for step in self._steps:
                step.left_s -= (now_s - self._moved_at_s) * self._pace(step)
        self._moved_at_s = now_s

    def _tell_others(self, step: PacedStep) -> None:
        for other in self._steps:
            if other is not step:
                other.on_pace()
