"""When a turn of the step loop has lasted too long, by how long turns usually take."""

from __future__ import annotations

import pytest

from engine.core.runner_contract import StepCosts
from node.flow.step_progress import (
    LEAST_LIMIT_S,
    MOST_LIMIT_S,
    TICK_S,
    TIMES_EXPECTED,
    TIMES_LONGEST,
    WINDOW_TICKS,
    StepProgress,
    expected_step_s,
)


def busy_for(progress: StepProgress, length_s: float, since_s: float = 1.0) -> None:
    """A turn that is still under way."""
    progress.look(since_s)
    for _ in range(round(length_s / TICK_S)):
        progress.look(since_s)


def turn_of(progress: StepProgress, length_s: float) -> None:
    busy_for(progress, length_s)
    progress.look(None)


def test_a_turn_is_stuck_behind_its_limit_and_not_before() -> None:
    progress = StepProgress(0.0)
    busy_for(progress, LEAST_LIMIT_S)
    assert (progress.turn_s, progress.stuck_s) == (LEAST_LIMIT_S, 0.0)
    progress.look(1.0)
    assert progress.stuck_s == progress.turn_s == LEAST_LIMIT_S + TICK_S
    progress.look(None)
    assert (progress.turn_s, progress.stuck_s) == (0.0, 0.0)


def test_the_turn_after_a_stuck_one_is_not_stuck() -> None:
    progress = StepProgress(0.0)
    busy_for(progress, LEAST_LIMIT_S + TICK_S)
    busy_for(progress, TICK_S, since_s=2.0)
    assert (progress.turn_s, progress.stuck_s) == (TICK_S, 0.0)


def test_turn_after_turn_is_progress_and_so_is_waiting_for_work() -> None:
    progress = StepProgress(0.0)
    for number in range(1000):
        progress.look(float(number))
    for _ in range(1000):
        progress.look(None)
    assert progress.stuck_s == 0.0
    assert progress.limit_s == LEAST_LIMIT_S, "turns shorter than a tick raise no limit"


def test_the_limit_follows_the_longest_turn_until_that_is_long_ago() -> None:
    progress = StepProgress(0.0)
    turn_of(progress, 1.0)
    turn_of(progress, 0.5)
    assert progress.limit_s == TIMES_LONGEST * (1.0 + TICK_S)
    busy_for(progress, progress.limit_s)
    assert progress.stuck_s == 0.0
    progress.look(None)
    for _ in range(WINDOW_TICKS):
        progress.look(None)
    assert progress.limit_s > LEAST_LIMIT_S
    for _ in range(WINDOW_TICKS):
        progress.look(None)
    assert progress.limit_s == LEAST_LIMIT_S


def test_the_first_large_step_has_a_limit_of_its_own() -> None:
    assert StepProgress(2.0).limit_s == TIMES_EXPECTED * 2.0
    assert StepProgress(1e6).limit_s == MOST_LIMIT_S
    progress = StepProgress(2.0)
    turn_of(progress, 60.0)
    assert progress.limit_s == MOST_LIMIT_S


def test_a_node_gives_up_a_turn_of_two_minutes_and_no_shorter_one() -> None:
    progress = StepProgress(0.0)
    busy_for(progress, MOST_LIMIT_S)
    assert not progress.is_stalled
    progress.look(1.0)
    assert progress.is_stalled


def test_a_turn_that_lasted_while_the_process_stood_still_is_one_look_older() -> None:
    """No clock is read: whoever was frozen for an hour looks once."""
    progress = StepProgress(0.0)
    busy_for(progress, 1.0)
    progress.look(1.0)
    assert progress.turn_s == 1.0 + TICK_S


@pytest.mark.parametrize(
    ("num_tokens", "wanted_s"),
    [(1, 0.1), (4, 0.1), (8, 0.2), (12, 0.3), (38, 0.5), (64, 0.7), (128, 1.4)],
)
def test_a_step_is_expected_to_cost_by_its_tokens(num_tokens: int, wanted_s: float) -> None:
    """By the lines through what was measured, and in proportion beyond the widest step."""
    costs = StepCosts((4, 12, 64), (0.1, 0.3, 0.7))
    assert expected_step_s(costs, num_tokens) == pytest.approx(wanted_s)


def test_of_one_measured_step_a_narrower_one_costs_as_much() -> None:
    costs = StepCosts((64,), (0.7,))
    assert [expected_step_s(costs, num_tokens) for num_tokens in (1, 64, 128)] == [0.7, 0.7, 1.4]
