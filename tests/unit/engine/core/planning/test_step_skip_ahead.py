"""Bypassing a blocked head: how many may, how often, and which sequences keep their position."""

from __future__ import annotations

import pytest

from engine.core.planner_contract import StepPlan, StopRule
from tests.support.engine.planner_views import (
    BS,
    View,
    admitted,
    decoding,
    plan,
    preempted,
    prefilling,
    waiting,
)
from tests.support.engine.policy_views import policy


def needs(*counts: int, bypassed: int = 0) -> list[View]:
    """A queue of prompts that need this many blocks; the head was bypassed `bypassed` times."""
    queue = [waiting(1 + i, count * BS - 8) for i, count in enumerate(counts)]
    return [waiting(1, counts[0] * BS - 8, bypassed=bypassed), *queue[1:]]


def outcome(step: StepPlan) -> tuple[list[int], dict[int, int], StopRule]:
    num_bypassed = {blocked: len(passing) for blocked, passing in step.bypassed.items()}
    return admitted(step), num_bypassed, step.stopped_by


@pytest.mark.covers("C25", "E66", "F99", "S43")
def test_two_may_pass_a_head_that_does_not_fit() -> None:
    queue = needs(60, 20, 25)
    assert outcome(plan(queue=queue, pool=50, window=0)) == ([], {}, StopRule.NO_BLOCKS)
    assert outcome(plan(queue=queue, pool=50, window=2)) == (
        [2, 3],
        {1: 2},
        StopRule.NO_BLOCKS,
    )


@pytest.mark.covers("E66")
def test_what_the_reservation_keeps_back_is_not_free() -> None:
    running = [decoding(9, 4031, 63, most=4097)]
    reservation = policy("token_ratio")
    assert reservation.demand(running[0]) == 45
    step = plan(
        running=running,
        queue=[waiting(i, n * BS - 8, most=0) for i, n in ((1, 60), (2, 20), (3, 25))],
        pool=45 + 50,
        window=2,
        reservation=reservation,
    )
    assert outcome(step) == ([2, 3], {1: 2}, StopRule.RESERVED)


@pytest.mark.covers("E67", "S43")
def test_a_head_that_was_passed_often_enough_is_a_barrier() -> None:
    step = plan(queue=needs(60, 20, 25, 5), pool=50, window=4, limit=2)
    assert outcome(step) == ([2, 3], {1: 2}, StopRule.BARRIER)
    later = plan(queue=needs(60, 5, 5, bypassed=2), pool=50, window=4, limit=2)
    assert outcome(later) == ([], {}, StopRule.BARRIER)
    fits = plan(queue=needs(60, 5, 5, bypassed=2), pool=70, window=4, limit=2)
    assert outcome(fits) == ([1, 2, 3], {}, StopRule.NOTHING_WAITS)


@pytest.mark.covers("S43")
@pytest.mark.parametrize(
    ("window", "seated"), [(0, []), (1, [2]), (2, [2, 3]), (3, [2, 3, 4]), (9, [2, 3, 4, 5])]
)
def test_no_more_than_the_window_pass_in_one_step(window: int, seated: list[int]) -> None:
    step = plan(queue=needs(60, 5, 5, 5, 5), pool=50, window=window)
    assert admitted(step) == seated
    assert step.bypassed == ({1: seated} if seated else {})


@pytest.mark.covers("S43")
def test_the_window_reaches_no_further_behind_several_that_are_blocked() -> None:
    queue = needs(60, 70, 80, 5)
    assert admitted(plan(queue=queue, pool=50, window=2)) == []
    assert outcome(plan(queue=queue, pool=50, window=3)) == (
        [4],
        {1: 1, 2: 1, 3: 1},
        StopRule.NO_BLOCKS,
    )


@pytest.mark.covers("S43")
def test_a_sequence_blocked_further_back_becomes_a_barrier_too() -> None:
    queue = [waiting(1, 60 * BS), waiting(2, 70 * BS, bypassed=15), waiting(3, 5), waiting(4, 5)]
    step = plan(queue=queue, pool=50, window=4, limit=16)
    assert outcome(step) == ([3], {1: 1, 2: 1}, StopRule.BARRIER)


@pytest.mark.covers("S43")
def test_a_limit_of_0_is_strict_order() -> None:
    assert outcome(plan(queue=needs(60, 5), pool=50, window=4, limit=0)) == (
        [],
        {},
        StopRule.BARRIER,
    )


@pytest.mark.covers("S43")
def test_nobody_passes_a_victim_that_does_not_fit() -> None:
    queue = [preempted(1, 60 * BS), waiting(2, 5), waiting(3, 5)]
    assert outcome(plan(queue=queue, pool=50, window=4)) == ([], {}, StopRule.BARRIER)
    assert outcome(plan(queue=queue, pool=70, window=4))[0] == [1, 2, 3]
    # One that waits behind a blocked newcomer stops those behind itself.
    queue = [waiting(1, 60 * BS), waiting(2, 5), preempted(3, 60 * BS), waiting(4, 5)]
    assert outcome(plan(queue=queue, pool=50, window=4)) == ([2], {1: 1}, StopRule.BARRIER)


def test_a_head_that_fits_is_passed_by_nobody() -> None:
    step = plan(queue=needs(20, 25, 60, 5), pool=50, window=2)
    assert outcome(step) == ([1, 2, 4], {3: 1}, StopRule.NO_BLOCKS)


@pytest.mark.covers("S42")
def test_one_without_tokens_for_its_chunk_keeps_its_place() -> None:
    running = [prefilling(8, 100, 0)]
    step = plan(running=running, queue=[waiting(9, 5), waiting(10, 5)], cap=100, window=4)
    assert outcome(step) == ([], {}, StopRule.NO_BUDGET)
    step = plan(queue=[waiting(9, 100), waiting(10, 5)], cap=63, granularity=64, window=4)
    assert outcome(step) == ([], {}, StopRule.NO_BUDGET)


def test_the_rule_that_is_told_is_the_one_that_stopped_the_head() -> None:
    # The head lacks blocks; what lies behind it lacks a seat.
    step = plan(queue=needs(60, 5, 5), pool=50, seats=1, window=4)
    assert outcome(step) == ([2], {1: 1}, StopRule.NO_BLOCKS)


@pytest.mark.covers("S15")
def test_an_idle_node_leaves_no_seat_empty_within_the_window() -> None:
    for pool in range(1, 64):
        queue = needs(9, 17, 3, 30, 1)
        step = plan(queue=queue, pool=pool, window=5)
        left = pool - sum(a.num_new_blocks for a in step.admissions)
        behind = [v for v in queue if v.sequence_id not in admitted(step)]
        assert all(-(-(v.num_known + 1) // BS) > left for v in behind), f"{pool} blocks"
