"""How fast the machine is, over time: two steps of the model that are always the same.

The speed of a virtual machine changes by half within minutes, by what others do on its host: its
clock, and separately its memory. So there are two steps, one that mostly reads weights (a token of
one answer), and one that mostly multiplies (a chunk of a prompt).

Beside a cluster that computes, a step waits for memory that nodes use, and nodes wait for what it
uses: it would be slower than the machine, and so would they. So a sample is taken while no request
is under way. One may come meanwhile: a sample is measured in seconds of the processor, so a pause
does not count, and of the samples around a time the lower quartile counts.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, Protocol

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import StepBatch, batch_of
from pdserve.profiling.served_times import Ask
from simulator.profile import StepTimes

EVERY_S = 2.0
"""The least seconds from one sample to the next."""
_POLL_S = 0.05
"""So often it is asked whether a request is under way."""
AROUND_S = 8.0
"""Samples of so many seconds before a time and after it say how fast the machine was."""
_CONTEXT, _CHUNK = 128, 64
_GREEDY = SampleInput(SamplingParams(max_tokens=1, temperature=0.0), 0, [0], [])


class Pace(NamedTuple):
    """Seconds of the two steps, or how many times as long as before they take."""

    decode: float
    prompt: float


@dataclass(slots=True)
class SpeedHistory:
    """Samples, by their times in ascending order."""

    at_s: list[float] = field(default_factory=list)
    paces: list[Pace] = field(default_factory=list)

    def add(self, at_s: float, pace: Pace) -> None:
        """Add the latest sample."""
        self.at_s.append(at_s)
        self.paces.append(pace)

    def around(self, at_s: float) -> Pace:
        """Return the lower quartile of the samples within `AROUND_S`, or of the nearest one.

        Raises `ValueError` without samples.
        """
        begin, end = (
            bisect_left(self.at_s, at_s - AROUND_S),
            bisect_right(self.at_s, at_s + AROUND_S),
        )
        if not self.at_s:
            raise ValueError("there is no sample of the machine's speed")
        if begin == end:
            nearest = min(range(len(self.at_s)), key=lambda one: abs(self.at_s[one] - at_s))
            begin, end = nearest, nearest + 1
        found = zip(*self.paces[begin:end], strict=True)
        return Pace(*(sorted(values)[len(values) // 4] for values in found))

    def mean(self) -> Pace:
        """Return the mean over time of `around`."""
        found = [self.around(one) for one in self.at_s]
        return Pace(fmean(one.decode for one in found), fmean(one.prompt for one in found))


class Runner(Protocol):
    """What is timed."""

    def execute(self, batch: StepBatch) -> object:
        """Run one step."""


class SpeedMeter:
    """Times the two steps on a runner that is warm, on a thread of its own while `sampling`."""

    def __init__(
        self,
        runner: Runner,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        blocks = range(-(-(_CONTEXT + 1) // block_size))
        self._decode = [ScheduledSequence(0, [0], _CONTEXT, blocks, _GREEDY)]
        self._chunk = [ScheduledSequence(0, [0] * _CHUNK, 0, blocks, None, next_token_id=0)]
        self._runner, self._clock, self._cpu_s = runner, clock, cpu_s

    def sample(self) -> Pace:
        """Time both steps once."""
        return Pace(self._step_s(self._decode), self._step_s(self._chunk))

    def sample_into(self, history: SpeedHistory) -> None:
        """Add a sample that is taken now."""
        history.add(self._clock(), self.sample())

    @contextmanager
    def sampling(self, is_idle: Callable[[], bool] = lambda: True) -> Iterator[SpeedHistory]:
        """Sample before the context, while it lasts and nothing is under way, and after it."""
        history, has_ended = SpeedHistory(), threading.Event()
        self.sample_into(history)

        def sample_all() -> None:
            wait_s = EVERY_S
            while not has_ended.wait(wait_s):
                wait_s = _POLL_S
                if is_idle():
                    self.sample_into(history)
                    wait_s = EVERY_S

        thread = threading.Thread(target=sample_all, name="machine-speed")
        thread.start()
        try:
            yield history
        finally:
            has_ended.set()
            thread.join()
            self.sample_into(history)

    def _step_s(self, batch: list[ScheduledSequence]) -> float:
        began_s = self._cpu_s()
        self._runner.execute(batch_of(batch))
        return self._cpu_s() - began_s


class SampledBetween:
    """Asks as `ask` does, and samples before each request that finds no other under way.

    A cluster that is asked without a pause computes all the time, and no sample beside it would be
    alone.
    """

    def __init__(self, ask: Ask, meter: SpeedMeter, history: SpeedHistory) -> None:
        self._ask, self._meter, self._history = ask, meter, history
        self._lock, self._num_open = threading.Lock(), 0

    def __call__(
        self, num_prompt: int, num_output: int, at_s: list[float], on_token: Callable[[], object]
    ) -> float:
        with self._lock:
            is_alone, self._num_open = not self._num_open, self._num_open + 1
        try:
            if is_alone:
                self._meter.sample_into(self._history)
            return self._ask(num_prompt, num_output, at_s, on_token)
        finally:
            with self._lock:
                self._num_open -= 1


@dataclass(frozen=True, slots=True)
class Slowness:
    """How many times as long as in a profile steps took, by seconds since `began_at_s`.

    `profiled` are the seconds of the two steps when the profile was measured.
    """

    history: SpeedHistory
    profiled: Pace
    began_at_s: float = 0.0

    def at(self, since_s: float) -> Pace:
        """Return it so many seconds after the begin."""
        return self._of(self.history.around(self.began_at_s + since_s))

    def shown(self) -> dict[str, list[float]]:
        """Return the least, the mean and the most of both steps."""
        found = [self._of(self.history.around(one)) for one in self.history.at_s]
        return {
            name: [round(choose(values), 3) for choose in (min, fmean, max)]
            for name, values in zip(Pace._fields, zip(*found, strict=True), strict=True)
        }

    def _of(self, now: Pace) -> Pace:
        return Pace(now.decode / self.profiled.decode, now.prompt / self.profiled.prompt)


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
        """As of the profile."""
        return self._steps.pairs_per_token

    def step_s(self, batch: StepBatch, num_copied_blocks: int = 0) -> float:
        """Return the seconds of a step that begins now."""
        pace = self._slowness.at(self.now_s())
        factor = pace.decode if batch.is_decode.all() else pace.prompt
        return factor * self._steps.step_s(batch, num_copied_blocks)

    def ends_of_decodes(
        self, began_s: float, count: int, context: int, num_steps: int
    ) -> list[float]:
        """Return the ends of steps of decodes, all of them at the speed when the first begins."""
        factor = self._slowness.at(began_s).decode
        ends_s = self._steps.ends_of_decodes(0.0, count, context, num_steps)
        return [began_s + factor * one for one in ends_s]
