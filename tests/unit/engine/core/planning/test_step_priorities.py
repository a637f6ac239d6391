"""Preemption for a more important sequence: only if it helps, and nothing is lost by it."""

from __future__ import annotations

from math import ceil

import pytest

from engine.core.planner_contract import Preemption, PreemptionReason, StepPlan, StopRule
from tests.support.engine.choices import ORDERS
from tests.support.engine.planner_views import (
    Pool,
    admitted,
    decoding,
    plan,
    preempted,
    prefilling,
    receiving,
    tokens,
    victims,
    waiting,
)
from tests.support.engine.policy_views import policy


def outcome(step: StepPlan) -> tuple[list[int], list[int]]:
    return victims(step), admitted(step)


@pytest.mark.covers("S33", "F144")
def test_an_important_one_takes_the_seat_of_the_least_important_decode() -> None:
    running = [decoding(1, 70), decoding(2, 70, priority=-1), decoding(3, 70)]
    queue = [waiting(9, 10, priority=1)]
    step = plan(running=running, queue=queue, seats=3, priorities=True)
    assert step.preempted == [Preemption(2, PreemptionReason.PRIORITY)]
    assert admitted(step) == [9]
    # Priorities count where they are switched on.
    step = plan(running=running, queue=queue, seats=3)
    assert (*outcome(step), step.stopped_by) == ([], [], StopRule.NO_SEAT)


def test_among_equals_the_latest_arrival_goes_first() -> None:
    running = [decoding(i, 70) for i in (1, 2, 3)]
    step = plan(running=running, queue=[waiting(9, 10, priority=1)], seats=3, priorities=True)
    assert outcome(step) == ([3], [9])


@pytest.mark.parametrize("priority", [-1, 0])
def test_nobody_goes_for_an_equal_or_a_lesser_one(priority: int) -> None:
    running = [decoding(i, 70) for i in (1, 2, 3)]
    queue = [waiting(9, 10, priority=priority)]
    step = plan(running=running, queue=queue, seats=3, priorities=True)
    assert (*outcome(step), step.stopped_by) == ([], [], StopRule.NO_SEAT)


@pytest.mark.covers("S17")
def test_prefills_and_transfers_do_not_go() -> None:
    running = [prefilling(2, 100, 10), prefilling(3, 100, 0)]
    queue = [waiting(9, 10, priority=5)]
    landing = [receiving(4, 10, 1)]
    step = plan(running=running, landing=landing, queue=queue, seats=3, priorities=True)
    assert outcome(step) == ([], [])


@pytest.mark.covers("S34")
def test_the_only_decode_goes_too_because_another_takes_its_place() -> None:
    queue = [waiting(9, 10, priority=5)]
    running = [decoding(1, 70), prefilling(2, 100, 10)]
    step = plan(
        running=running, landing=[receiving(4, 10, 1)], queue=queue, seats=3, priorities=True
    )
    assert outcome(step) == ([1], [9])
    step = plan(running=running[:1], queue=queue, seats=1, priorities=True)
    assert outcome(step) == ([1], [9])
    # Every decode, if it must be.
    running = [decoding(i, 640, 11, priority=-i) for i in (1, 2, 3)]
    step = plan(
        running=running, queue=[waiting(9, 33 * 64 - 10, priority=1)], pool=0, priorities=True
    )
    assert outcome(step) == ([3, 2, 1], [9])


@pytest.mark.covers("S24")
def test_nothing_is_kept_back_when_everyone_makes_way() -> None:
    # The reservation would keep back 45 blocks for the newcomer's own output.
    running = [decoding(1, 640, 11)]
    queue = [waiting(9, 640, priority=1, most=4096)]
    reservation = policy("token_ratio")
    step = plan(running=running, queue=queue, pool=0, priorities=True, reservation=reservation)
    assert outcome(step) == ([1], [9])


@pytest.mark.covers("S33")
def test_the_fewest_tokens_of_work_are_lost() -> None:
    # Five lower ones; one old and big one alone makes the room that four small ones do not make.
    big = decoding(1, 640, 11)
    running = [big, *(decoding(i, 70) for i in (2, 3, 4, 5))]
    queue = [waiting(9, 11 * 64 - 10, priority=1)]
    step = plan(running=running, queue=queue, pool=0, priorities=True)
    assert outcome(step) == ([1], [9])
    # Where small ones are enough, the big one stays, and no more of them go than must.
    queue = [waiting(9, 4 * 64 - 10, priority=1)]
    step = plan(running=running, queue=queue, pool=0, priorities=True)
    assert outcome(step) == ([5, 4], [9])
    # A lower priority goes before a smaller one.
    running = [decoding(1, 640, 11, priority=-1), decoding(2, 70)]
    step = plan(running=running, queue=queue, pool=0, priorities=True)
    assert outcome(step) == ([1], [9])


@pytest.mark.covers("S37")
def test_one_that_just_came_back_keeps_its_blocks_until_it_has_made_progress() -> None:
    queue = [waiting(9, 10, priority=1)]
    for since, goes in ((15, []), (16, [1])):
        running = [decoding(1, 70, output=50, since_resume=since)]
        step = plan(running=running, queue=queue, seats=1, progress=16, priorities=True)
        assert victims(step) == goes


# --- the token budget -----------------------------------------------------------------------------


@pytest.mark.covers("S12")
def test_an_urgent_prompt_is_computed_beside_a_long_one() -> None:
    running = [prefilling(1, 32_000, 0)]
    queue = [waiting(9, 50, priority=1), waiting(10, 50)]
    step = plan(running=running, queue=queue, cap=2048, priorities=True)
    assert tokens(step) == {1: 1998, 9: 50}
    # As without priorities, others wait.
    assert tokens(plan(running=running, queue=queue, cap=2048)) == {1: 2048}


@pytest.mark.covers("S12")
def test_a_running_urgent_prompt_goes_before_an_older_one_which_keeps_a_share() -> None:
    running = [prefilling(1, 32_000, 0), prefilling(2, 32_000, 0, priority=1)]
    step = plan(running=running, cap=2048, priorities=True)
    assert tokens(step) == {1: 256, 2: 1792}
    step = plan(running=running, queue=[waiting(9, 5000, priority=2)], cap=2048, priorities=True)
    assert tokens(step) == {1: 256, 9: 1792}
    step = plan(running=running, cap=2048, granularity=512, priorities=True)
    assert tokens(step) == {1: 512, 2: 1536}
    # It leaves nothing for an equal one.
    step = plan(running=running, queue=[waiting(9, 500, priority=1)], cap=2048, priorities=True)
    assert tokens(step) == {1: 256, 2: 1792}
    assert tokens(plan(running=running, cap=2048)) == {1: 2048}


def test_tokens_that_an_urgent_prompt_cannot_use_go_to_the_running_ones() -> None:
    running = [prefilling(1, 32_000, 0)]
    queue = [waiting(9, 640, priority=1)]
    step = plan(running=running, queue=queue, pool=3, cap=2048, priorities=True)
    assert tokens(step) == {1: 2048}
    # Most of the urgent one's tokens are cached.
    cached = {9: tuple(range(9))}
    step = plan(running=running, queue=queue, cached=cached, cap=2048, priorities=True)
    assert tokens(step) == {1: 1984, 9: 64}
    # A prompt that is computed elsewhere takes no tokens here.
    queue = [waiting(9, 640, priority=1, remote=True)]
    step = plan(running=running, queue=queue, cap=2048, priorities=True)
    assert (tokens(step), admitted(step)) == ({1: 2048}, [9])
    step = plan(running=running, queue=[*queue, waiting(10, 640)], cap=2048, priorities=True)
    assert (tokens(step), admitted(step)) == ({1: 2048}, [9])


def test_nobody_goes_when_it_would_not_be_enough() -> None:
    running = [decoding(1, 640, 11), decoding(2, 640, 11)]
    step = plan(running=running, queue=[waiting(9, 1472, priority=1)], pool=1, priorities=True)
    assert (*outcome(step), step.stopped_by) == ([], [], StopRule.NO_BLOCKS)
    step = plan(running=running, queue=[waiting(9, 760, priority=1)], pool=1, priorities=True)
    assert outcome(step) == ([2], [9])


def test_nobody_goes_for_one_that_came_back_and_would_not_be_seated_all_the_same() -> None:
    # An important victim also needs room for some steps of everybody (S37): three blocks, not two.
    running = [decoding(1, 70, priority=1), decoding(2, 70)]
    queue = [preempted(9, 100, priority=1)]
    step = plan(running=running, queue=queue, pool=0, retract=20, priorities=True)
    assert outcome(step) == ([], [])
    step = plan(running=running, queue=queue, pool=1, retract=20, priorities=True)
    assert outcome(step) == ([2], [9])


@pytest.mark.covers("C27", "S36")
def test_a_victim_counts_with_what_it_holds_and_not_with_what_it_might_need() -> None:
    held_tokens, left_to_produce, shortfall = 20_000, 10, 1000
    upstream_credit = ceil(left_to_produce * 0.7)
    assert upstream_credit == 7 < shortfall
    victim = decoding(2, held_tokens, 313, output=100, most=100 + left_to_produce)
    running = [decoding(1, 70, most=1), victim]
    queue = [waiting(9, shortfall, priority=1, most=0)]
    step = plan(
        running=running, queue=queue, pool=0, priorities=True, reservation=policy("token_ratio")
    )
    assert outcome(step) == ([2], [9])
    shared = frozenset(victim.block_table)
    step = plan(running=running, queue=queue, pool=Pool(0, shared=shared), priorities=True)
    assert outcome(step) == ([], [])


def test_what_a_victim_would_have_needed_is_not_kept_back_any_more() -> None:
    reservation = policy("token_ratio")
    # Each is expected to need 45 blocks more; 45 are free.
    running = [decoding(i, 4031, 63, most=4097) for i in (1, 2)]
    step = plan(
        running=running,
        queue=[waiting(9, 640, priority=1, most=0)],
        pool=45,
        priorities=True,
        reservation=reservation,
    )
    assert outcome(step) == ([2], [9])
    assert step.num_growth_blocks == 45


@pytest.mark.covers("S40")
def test_what_was_planned_for_a_victim_is_given_back() -> None:
    # The victim had a token, four drafts and a new block in this step.
    running = [decoding(1, 70, drafts=4), decoding(2, 64, drafts=4)]
    queue = [waiting(9, 500, priority=1)]
    step = plan(running=running, queue=queue, pool=100, seats=2, cap=100, k=4, priorities=True)
    assert outcome(step) == ([2], [9])
    assert (step.num_decode_tokens, step.num_draft_tokens) == (1, 4)
    assert tokens(step)[1] == 5
    assert 2 not in step.chunks
    assert step.num_tokens == sum(tokens(step).values()) <= 100
    # Its one block and the one that was meant for it hold the newcomer.
    step = plan(
        running=running, queue=[waiting(9, 100, priority=1)], pool=1, seats=2, k=4, priorities=True
    )
    assert outcome(step) == ([2], [9])
    assert step.admissions[0].num_new_blocks == 2


@pytest.mark.covers("S40")
def test_the_tokens_of_a_victim_are_there_for_the_sequence_that_takes_its_place() -> None:
    # Four decodes use the whole budget: the newcomer's first chunk is what its victim leaves.
    running = [decoding(i, 70, drafts=1) for i in (1, 2, 3, 4)]
    queue = [waiting(9, 10, priority=1)]
    step = plan(running=running, queue=queue, seats=4, cap=8, k=1, priorities=True)
    assert outcome(step) == ([4], [9])
    assert tokens(step) == {1: 2, 2: 2, 3: 2, 9: 2}


@pytest.mark.covers("S37")
def test_one_that_just_came_back_is_spared_here_too() -> None:
    running = [decoding(1, 70, output=50), decoding(2, 70, output=50, since_resume=3)]
    queue = [waiting(9, 10, priority=1)]
    step = plan(running=running, queue=queue, seats=2, progress=16, priorities=True)
    assert outcome(step) == ([1], [9])


def test_a_victims_own_prefix_is_claimed_by_the_sequence_that_takes_its_place() -> None:
    # The blocks of sequence 2 hold the newcomer's first 128 tokens.
    running = [decoding(1, 70, priority=1), decoding(2, 130, (5, 6, 7))]
    queue = [waiting(9, 140, priority=1)]
    cached = {9: (5, 6)}
    step = plan(running=running, queue=queue, pool=0, cached=cached, seats=2, priorities=True)
    assert outcome(step) == ([2], [9])
    (admission,) = step.admissions
    assert (admission.cached_block_ids, admission.num_new_blocks) == ((5, 6), 1)


def test_a_victims_blocks_are_not_given_away_twice() -> None:
    # The victim's eleven blocks hold 640 tokens of the one behind: with them and one more it takes
    # all of the eleven, of which the important one gets five.
    victim = tuple(range(2000, 2011))
    running = [decoding(1, 640, 11), decoding(2, 640, victim)]
    queue = [waiting(9, 310, priority=1, most=1), waiting(10, 650, most=1)]
    cached = {10: victim[:10]}
    step = plan(running=running, queue=queue, pool=0, cached=cached, priorities=True)
    assert (*outcome(step), step.stopped_by) == ([2], [9], StopRule.NO_BLOCKS)
    step = plan(running=running, queue=queue, pool=5, cached=cached, priorities=True)
    assert outcome(step) == ([], [9])
    # Six from the victim and five at hand hold both, and the second is seated on the victim's.
    queue = [waiting(9, 380, priority=1, most=1), waiting(10, 650, most=1)]
    step = plan(running=running, queue=queue, pool=5, cached=cached, priorities=True)
    assert outcome(step) == ([2], [9])
    step = plan(
        running=running,
        queue=[queue[0], waiting(10, 600, most=1)],
        pool=5,
        cached={10: victim[:9]},
        priorities=True,
    )
    assert outcome(step) == ([2], [9, 10])


@pytest.mark.parametrize(("length", "fits"), [(64, True), (65, False)])
def test_blocks_shared_with_a_sequence_just_admitted_are_not_freed(length: int, fits: bool) -> None:
    # The first in line is seated beside sequence 2, on ten of its blocks: only one is left to take.
    running = [decoding(1, 70), decoding(2, 640, tuple(range(2000, 2011)), priority=-1)]
    queue = [waiting(8, 650, priority=1, most=1), waiting(9, length, most=0)]
    cached = {8: tuple(range(2000, 2010))}
    step = plan(running=running, queue=queue, pool=1, cached=cached, priorities=True)
    assert outcome(step) == (([2], [8, 9]) if fits else ([], [8]))


def test_only_the_head_may_take_from_others() -> None:
    running = [decoding(1, 640, 11), decoding(2, 640, 11)]
    queue = [waiting(8, 6400, priority=2), waiting(9, 500, priority=1)]
    step = plan(running=running, queue=queue, pool=5, window=4, priorities=True)
    assert outcome(step) == ([], [])


def test_the_next_in_line_may_when_the_head_is_seated() -> None:
    running = [decoding(i, 70) for i in (1, 2, 3)]
    queue = [waiting(8, 10, priority=2), waiting(9, 10, priority=1), waiting(10, 10, priority=0)]
    step = plan(running=running, queue=queue, seats=3, priorities=True)
    assert outcome(step) == ([3, 2], [8, 9])


@pytest.mark.covers("S14")
def test_equal_ones_are_told_apart_by_arrival() -> None:
    running = [decoding(i, 70) for i in (1, 2, 3)]
    queue = [waiting(9, 10, priority=1)]
    for order in ORDERS:
        step = plan(running=running, queue=queue, seats=3, priorities=True, order=order)
        assert victims(step) == [3]
