"""The speed of the machine over time, and plans that follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.plan.machine_speed import AROUND_S, LEAST_WORK_S, SlowedSteps, Slowness, slowed
from bench.plan.recorded_steps import TimedStep
from common.errors import ConfigError
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import StepBatch, batch_of
from simulator.profile import FOLDER, read_profile
from simulator.profiles.beside_steps import BesideSteps

PROFILE = read_profile(FOLDER / "8b_h100.json")
STEPS = PROFILE.step


def ran(begin_s: float, end_s: float, factor: float, kind: str = "1 answer") -> TimedStep:
    """Return a step that took so many times as long as its profile says, alone."""
    took_s = end_s - begin_s
    return TimedStep(begin_s, end_s, took_s / factor, took_s, kind)


def test_without_steps_there_is_no_speed() -> None:
    with pytest.raises(ConfigError, match="no step was recorded"):
        Slowness([ran(0, 1, 1.0)], began_at_s=1.0)


def test_the_steps_around_a_time_say_how_slow_the_machine_was() -> None:
    """All of them together: a factor is a ratio of sums, of their parts within the span."""
    second = 2 * AROUND_S
    slow = Slowness([ran(0, second, 1.0), ran(second, 2 * second, 3.0)])
    assert slow.at(AROUND_S) == pytest.approx(1.0)
    assert slow.at(3 * AROUND_S) == pytest.approx(3.0)
    assert slow.at(second) == pytest.approx(2 / (1 + 1 / 3)), "half of the time in each"
    assert slow.at(0.0) == pytest.approx(1.0), "there is nothing before"
    beside = Slowness([ran(0, 4, 1.0), TimedStep(0, 4, 2.0, 3.0, "prompts")])
    assert beside.at(2.0) == pytest.approx((4 + 3) / (4 + 2))


def test_it_counts_from_the_begin_of_the_load_and_earlier_steps_do_not() -> None:
    slow = Slowness([ran(90, 99, 9.0), ran(100, 104, 2.0), ran(120, 130, 4.0)], 100.0)
    assert slow.at(0.0) == pytest.approx(2.0)
    assert slow.at(25.0) == pytest.approx(4.0)
    assert slow.mean() == pytest.approx(14 / (2 + 2.5))


def test_where_too_little_was_computed_steps_of_a_longer_span_count() -> None:
    near = ran(0, 10, 1.0), ran(30, 30.1, 5.0), ran(50, 60, 2.0)
    few = Slowness([*near, ran(1000, 1010, 9.0)])
    assert 0.02 < LEAST_WORK_S < 10 / 9
    assert few.at(30.0) == pytest.approx(20.1 / (10 + 0.02 + 5)), "both others, and the short one"
    assert few.at(1200.0) == pytest.approx(9.0), "the nearest one is enough"
    little = Slowness([ran(0, 0.01, 3.0)])
    assert little.at(0.0) == little.at(500.0) == pytest.approx(3.0)


def test_of_each_kind_its_own_factor_is_shown() -> None:
    shown = Slowness([ran(0, 8, 1.0), ran(8, 16, 2.0, "prompts"), ran(2, 3, 1.0)]).shown()
    assert shown["1 answer"] == [1.0, 1.0, 9.0]
    assert shown["prompts"][::2] == [2.0, 8.0]
    least, mean, most = shown["all"]
    assert (least, most) == (1.0, 2.0)
    assert 1.3 < mean < 1.7
    assert list(shown) == ["all", "1 answer", "prompts"]


def test_a_kind_is_compared_with_the_steps_around_it_and_not_with_those_of_another_time() -> None:
    """Prompts take twice as long as the profile says, beside answers that take what it says; and
    when the machine is three times as slow, there are answers alone."""
    some = [ran(0, 60, 1.0), ran(0, 60, 2.0, "prompts"), ran(60, 600, 3.0)]
    shown = Slowness(some).shown()
    assert shown["prompts"] == pytest.approx([2.0, 2 * (60 + 30) / 120, 60], abs=0.01)
    assert shown["1 answer"][1] == pytest.approx(1.0, abs=0.1)


def step(*num_tokens: int) -> StepBatch:
    return batch_of(
        [ScheduledSequence(i, [0] * n, 100, range(9), None) for i, n in enumerate(num_tokens)]
    )


def test_all_steps_of_a_plan_take_as_many_times_longer() -> None:
    steps = SlowedSteps(STEPS, Slowness([ran(0, 20, 2.0), ran(100, 120, 4.0)]))
    assert steps.pairs_per_token == STEPS.pairs_per_token
    for now_s, factor in ((0.0, 2.0), (110.0, 4.0)):
        steps.now_s = lambda at_s=now_s: at_s  # type: ignore[misc]
        for one in (step(1, 1), step(1, 64)):
            assert steps.step_s(one, 7) == pytest.approx(factor * STEPS.step_s(one, 7))
        ends_s = steps.ends_of_decodes(now_s, 2, 200, 3)
        alone_s = STEPS.ends_of_decodes(0.0, 2, 200, 3)
        assert ends_s == pytest.approx([now_s + factor * one for one in alone_s])


def test_what_is_beside_steps_has_the_mean_speed() -> None:
    beside = BesideSteps(request_s=0.01, push_s=0.02, handoff_s=0.5, turn_s=0.3)
    found, steps = slowed(replace(PROFILE, beside=beside), Slowness([ran(0, 9, 3.0)]))
    assert found.step is steps
    assert (found.beside.request_s, found.beside.push_s) == pytest.approx((0.03, 0.06))
    assert (found.beside.handoff_s, found.beside.turn_s) == (0.5, 0.3), "of transfers, and of steps"
