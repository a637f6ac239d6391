"""The speed of the machine over time, and plans that follow it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from bench.plan import machine_speed
from bench.plan.machine_speed import (
    AROUND_S,
    Pace,
    SampledBetween,
    SlowedSteps,
    Slowness,
    SpeedHistory,
    SpeedMeter,
)
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import StepBatch, batch_of
from simulator.profile import FOLDER, read_profile

STEPS = read_profile(FOLDER / "8b_h100.json").step
TIMEOUT_S = 20.0


def history(*samples: tuple[float, float, float]) -> SpeedHistory:
    found = SpeedHistory()
    for at_s, decode, prompt in samples:
        found.add(at_s, Pace(decode, prompt))
    return found


def test_the_lower_quartile_of_the_samples_around_a_time_counts() -> None:
    """A sample beside other work is slower; each of the two steps has its own quartile."""
    found = history((0, 1.0, 5.0), (AROUND_S, 2.0, 4.0), (AROUND_S + 1, 9.0, 3.0), (100, 3.0, 8.0))
    assert found.around(0) == (1.0, 4.0)
    assert found.around(AROUND_S) == (1.0, 3.0)
    assert found.around(AROUND_S + 1) == (2.0, 3.0)
    assert found.around(60) == (3.0, 8.0), "none is near, and this one is the nearest"
    assert found.around(-50) == (1.0, 5.0)
    assert found.mean() == ((1 + 1 + 2 + 3) / 4, (4 + 3 + 3 + 8) / 4)
    many = history(*((0.1 * n, 1.0 + n, 9.0 - n) for n in range(9)))
    assert many.around(0.4) == (3.0, 3.0)


def test_without_samples_there_is_no_speed() -> None:
    with pytest.raises(ValueError, match="no sample"):
        history().around(0)


def test_slowness_is_relative_to_the_profile_and_begins_with_the_load() -> None:
    slow = Slowness(history((100, 0.02, 0.3), (150, 0.03, 0.2)), Pace(0.01, 0.1), 100.0)
    assert slow.at(0.0) == pytest.approx((2, 3))
    assert slow.at(50.0) == pytest.approx((3, 2))
    assert slow.shown() == {"decode": [2.0, 2.5, 3.0], "prompt": [2.0, 2.5, 3.0]}


def step(*num_tokens: int) -> StepBatch:
    return batch_of(
        [ScheduledSequence(i, [0] * n, 100, range(9), None) for i, n in enumerate(num_tokens)]
    )


def test_steps_of_a_plan_take_as_many_times_longer_by_their_kind() -> None:
    slow = Slowness(history((0, 2.0, 3.0), (100, 4.0, 5.0)), Pace(1.0, 1.0))
    steps = SlowedSteps(STEPS, slow)
    assert steps.pairs_per_token == STEPS.pairs_per_token
    decodes, prompts = step(1, 1), step(1, 64)
    decodes.is_decode[:], prompts.is_decode[:] = True, (True, False)
    for now_s, factors in ((0.0, (2, 3)), (100.0, (4, 5))):
        steps.now_s = lambda at_s=now_s: at_s  # type: ignore[misc]
        took_s = [steps.step_s(one, 7) / STEPS.step_s(one, 7) for one in (decodes, prompts)]
        assert took_s == pytest.approx(factors)
        ends_s = steps.ends_of_decodes(now_s, 2, 200, 3)
        alone_s = STEPS.ends_of_decodes(0.0, 2, 200, 3)
        assert ends_s == pytest.approx([now_s + factors[0] * one for one in alone_s])


class Played:
    """A runner whose steps of one token take 1 s of the processor, and others 2 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sizes: list[int] = []

    def execute(self, batch: Sequence[ScheduledSequence]) -> None:
        num_tokens = len(batch[0].token_ids)
        self.now_s += 1.0 if num_tokens == 1 else 2.0
        self.sizes.append(num_tokens)


def test_samples_are_taken_as_long_as_something_is_measured() -> None:
    runner, times = Played(), count(10)
    meter = SpeedMeter(runner, 16, lambda: float(next(times)), lambda: runner.now_s)
    assert meter.sample() == (1.0, 2.0)
    with meter.sampling() as found:
        assert found.at_s == [10.0], "before anything begins"
    assert found.at_s == [10.0, 11.0], "at the begin and at the end"
    assert set(found.paces) == {(1.0, 2.0)}
    assert len(runner.sizes) == 6


def test_no_sample_is_taken_while_requests_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "EVERY_S", 0.0)
    monkeypatch.setattr(machine_speed, "_POLL_S", 0.0)
    runner, busy, asked = Played(), iter([False, True, True, False]), threading.Event()
    meter = SpeedMeter(runner, 16, lambda: 1.0, lambda: runner.now_s)

    def is_idle() -> bool:
        is_busy = next(busy, None)
        if is_busy is None:
            asked.set()
        return is_busy is False

    with meter.sampling(is_idle) as found:
        assert asked.wait(TIMEOUT_S)
    assert len(found.paces) == 4, "at the begin, twice between requests, at the end"


def test_between_requests_a_sample_is_taken_only_where_none_is_under_way() -> None:
    runner, found = Played(), SpeedHistory()
    meter = SpeedMeter(runner, 16, lambda: 1.0, lambda: runner.now_s)
    asked: list[tuple[int, int]] = []

    def ask(
        num_prompt: int, num_output: int, at_s: list[float], on_token: Callable[[], object]
    ) -> float:
        asked.append((num_prompt, len(found.paces)))
        on_token()
        return 5.0

    sampled = SampledBetween(ask, meter, found)
    assert sampled(1, 9, [], lambda: sampled(2, 9, [], lambda: None)) == 5.0
    assert asked == [(1, 1), (2, 1)]
    sampled(3, 9, [], lambda: None)
    assert asked[2] == (3, 2)
