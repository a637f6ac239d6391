"""How fast a machine was, over time, by the steps that its nodes ran; and a plan at that speed.

The speed of a virtual machine changes by half within minutes, by what others do on its host. A
profile does not know of it, and a plan that errs by it says nothing of the planner. So there is one
factor, over time, common to all nodes and all kinds of steps: how many times as long as the profile
says, of these steps in these shapes beside these others, the steps took that the nodes ran around
that time. A plan at that speed takes its steps times the factor.

What a plan at that speed can show: whether it places, queues, batches and moves KV as the cluster
does, how steps depend on their shapes, how prompts and answers slow each other down, and what a
request takes beside its steps. A kind of step that a profile has wrong is as wrong in that plan,
beside the other kinds.

What it cannot show: an error of the profile that is the same for all steps, or for the only kind of
step that runs for some seconds. Nor does it tell the machine's speed from the work of the router
and of the client on the same cores, which makes steps longer where there are as many nodes as
cores. For all of this there is the plan as profiled. `shown` has the factor of each kind of step,
also relative to all steps around them: where kinds differ, the profile errs, and where all are off
alike in the cluster with which it was measured, at that very time, it errs as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import numpy.typing as npt

from bench.plan.recorded_steps import TimedStep
from common.errors import ConfigError
from engine.core.step.step_batch import StepBatch
from simulator.profile import DeviceProfile, StepTimes

AROUND_S = 2.0
"""Steps of so many seconds before a time and after it say how fast the machine was."""
LEAST_WORK_S = 0.5
"""The least work of these steps, in seconds: with less, those of twice as long a span count."""
_Times = npt.NDArray[np.float64]


class Slowness:
    """How many times as long as a profile says steps took, by seconds since `began_at_s`."""

    def __init__(self, steps: Sequence[TimedStep], began_at_s: float = 0.0) -> None:
        """Take the steps that ended later than `began_at_s`. Raises `ConfigError` without any."""
        self._steps = [one for one in steps if one.end_s > began_at_s]
        if not self._steps:
            raise ConfigError("no step was recorded: wanted a cluster that has served")
        self._began_at_s = began_at_s
        self._at_s: _Times = np.unique([at for one in self._steps for at in one[:2]])
        self._work_s = self._until([one.work_s for one in self._steps])
        self._done_s = self._until([one.done_s for one in self._steps])

    def at(self, since_s: float) -> float:
        """Return the slowness `since_s` seconds after `began_at_s`."""
        now_s, around_s, most_s = self._began_at_s + since_s, AROUND_S, self._work_s[-1]
        while True:
            span = (now_s - around_s, now_s + around_s)
            work_s = np.diff(np.interp(span, self._at_s, self._work_s)).item()
            if work_s >= min(LEAST_WORK_S, 0.99 * most_s):
                return float(np.diff(np.interp(span, self._at_s, self._done_s)).item() / work_s)
            around_s *= 2

    def mean(self) -> float:
        """Return the slowness over all steps together."""
        return float(self._done_s[-1] / self._work_s[-1])

    def shown(self) -> dict[str, list[float]]:
        """Return the least, mean and largest slowness of all seconds, and for each kind of step its
        slowness, its ratio to that of all steps at the same time, and the seconds they took."""
        last_s = self._at_s[-1] - self._began_at_s
        all_s = [self.at(second) for second in range(1 + int(last_s))]
        kinds = defaultdict[str, list[TimedStep]](list)
        for one in self._steps:
            kinds[one.kind].append(one)
        found = {"all": [min(all_s), fmean(all_s), max(all_s)]}
        for kind, some in sorted(kinds.items()):
            work_s = sum(one.work_s for one in some)
            around_s = sum(one.work_s * self.at(_middle_s(one) - self._began_at_s) for one in some)
            done_s = sum(one.done_s for one in some)
            took_s = sum(one.end_s - one.begin_s for one in some)
            found[kind] = [done_s / work_s, done_s / around_s, took_s]
        return {name: [round(value, 3) for value in values] for name, values in found.items()}

    def _until(self, amounts_s: Sequence[float]) -> _Times:
        """Return the sum of these amounts, one of each step, up to each of the times; an amount
        grows evenly while its step lasts."""
        rates: _Times = np.zeros(len(self._at_s))
        for one, amount_s in zip(self._steps, amounts_s, strict=True):
            rate = amount_s / (one.end_s - one.begin_s)
            begin, end = np.searchsorted(self._at_s, one[:2])
            rates[begin] += rate
            rates[end] -= rate
        grown: _Times = np.cumsum(rates)[:-1] * np.diff(self._at_s)
        return np.concatenate(([0.0], np.cumsum(grown)))


def _middle_s(step: TimedStep) -> float:
    return (step.begin_s + step.end_s) / 2


class SlowedSteps:
    """The step times of a profile on a machine whose speed changes as that of a real one did.

    `now_s` is the time of the simulation.
    """

    def __init__(self, steps: StepTimes, slowness: Slowness) -> None:
        self._steps = steps
        self._slowness = slowness
        self.now_s: Callable[[], float] = lambda: 0.0

    @property
    def pairs_per_token(self) -> int:
        """Pairs of a query and a key that cost as much as a token, as the profile says."""
        return self._steps.pairs_per_token

    def step_s(self, batch: StepBatch, num_copied_blocks: int = 0) -> float:
        """Return the seconds of a step that begins now."""
        return self._slowness.at(self.now_s()) * self._steps.step_s(batch, num_copied_blocks)

    def ends_of_decodes(
        self, began_s: float, count: int, context: int, num_steps: int
    ) -> list[float]:
        """Return the ends of steps of decodes, all of them at the speed when the first begins."""
        factor = self._slowness.at(began_s)
        ends_s = self._steps.ends_of_decodes(0.0, count, context, num_steps)
        return [began_s + factor * one for one in ends_s]


def slowed(profile: DeviceProfile, slowness: Slowness) -> tuple[DeviceProfile, SlowedSteps]:
    """Return a profile at another speed, and its steps.

    What a request takes at the router and what pushes take has the mean speed of all the time.
    """
    steps, mean = SlowedSteps(profile.step, slowness), slowness.mean()
    beside = replace(
        profile.beside,
        request_s=mean * profile.beside.request_s,
        push_s=mean * profile.beside.push_s,
    )
    return replace(profile, step=steps, beside=beside), steps
