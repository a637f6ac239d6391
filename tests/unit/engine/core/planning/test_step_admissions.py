"""Admissions: seats, blocks, and the blocks kept back for running sequences."""

from __future__ import annotations

from typing import Any

import pytest

from common.kv.blocks import blocks_for
from engine.core.planner_contract import StepPlan, StopRule
from engine.core.policies.growth import MILLION, GrowthColumns
from engine.core.policies.reservation import RESERVATION_POLICIES, NoReservation
from tests.support.engine.planner_views import (
    BS,
    Pool,
    View,
    admitted,
    decoding,
    growth_columns,
    plan,
    preempted,
    prefilling,
    receiving,
    tokens,
    waiting,
)
from tests.support.engine.policy_views import SummedReservation, policy

GROWS_45 = {"most": 4097, "output": 1}
"""Remaining output 4096: at a ratio of 0.7 it is 2868 tokens, 45 blocks behind a full table."""


def grows_45(sequence_id: int) -> View:
    """A decode with a block just begun and filled: 45 blocks of growth at 0.7, 39 at 0.6."""
    return decoding(sequence_id, 4031, 63, **GROWS_45)


def in_flight_45(sequence_id: int) -> View:
    return receiving(sequence_id, 4000, 63, most=4096)


def token_ratio(num_steps: int = 0, **given: Any) -> SummedReservation:
    return policy("token_ratio", num_steps=num_steps, **given)


def stop(step: StepPlan) -> tuple[list[int], StopRule]:
    return admitted(step), step.stopped_by


# --- seats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_running", "num_landing", "seated"),
    [(0, 0, 3), (2, 0, 1), (1, 1, 1), (0, 3, 0), (2, 1, 0)],
)
def test_seats_are_held_by_running_sequences_and_those_that_wait_for_kv(
    num_running: int, num_landing: int, seated: int
) -> None:
    step = plan(
        running=[decoding(i, 32) for i in range(1, num_running + 1)],
        landing=[receiving(5 + i, 10, 1) for i in range(num_landing)],
        queue=[waiting(i, 10) for i in (11, 12, 13, 14)],
        exporting=7,
        seats=3,
    )
    assert stop(step) == ([11, 12, 13][:seated], StopRule.NO_SEAT)


# --- an idle node ---------------------------------------------------------------------------------


@pytest.mark.covers("C10", "E64", "F08")
def test_an_idle_node_takes_what_fits_its_pool() -> None:
    pool, length, most = 128, 7800, 100
    required = max(length + 512, length + most)
    assert (required, pool * BS) == (8312, 8192), "upstream: never admitted, never refused"
    for remote in (False, True):
        queue = [waiting(1, length, remote=remote, most=most), waiting(2, 10)]
        step = plan(queue=queue, pool=pool, reservation=token_ratio())
        assert admitted(step)[0] == 1
        (first, *_) = step.admissions
        assert first.num_new_blocks == blocks_for(length + remote, BS) == 122


@pytest.mark.covers("S24")
@pytest.mark.parametrize("k", [0, 3])
def test_the_reservation_is_waived_when_nobody_runs_and_nothing_is_in_flight(k: int) -> None:
    prompt = waiting(1, 64 * 100, most=100_000)
    needed = blocks_for(6400 + 1 + k, BS)
    everything = token_ratio(lookahead=k)
    assert stop(plan(queue=[prompt], pool=needed, k=k, reservation=everything)) == (
        [1],
        StopRule.NOTHING_WAITS,
    )
    # One step of lookahead must fit all the same.
    assert stop(plan(queue=[prompt], pool=needed - 1, k=k, reservation=everything)) == (
        [],
        StopRule.NO_BLOCKS,
    )
    for beside in (
        {"running": [decoding(2, 32)]},
        {"running": [prefilling(2, 32, 0)]},
        {"landing": [receiving(2, 32, 1)]},
    ):
        step = plan(queue=[prompt], pool=needed, k=k, reservation=everything, **beside)  # type: ignore[arg-type]
        assert stop(step) == ([], StopRule.RESERVED)
    # What a transfer still reads grows no more.
    assert admitted(plan(queue=[prompt], pool=needed, k=k, reservation=everything, exporting=3))


@pytest.mark.covers("S24")
def test_the_waiver_is_for_one_candidate_and_the_next_counts_it() -> None:
    queue = [waiting(1, 640, most=6400), waiting(2, 64, most=10)]
    assert stop(plan(queue=queue, pool=20, reservation=token_ratio())) == ([1], StopRule.RESERVED)
    assert admitted(plan(queue=queue, pool=12)) == [1, 2]


@pytest.mark.covers("E65", "F08", "S25")
@pytest.mark.parametrize(("length", "fits"), [(8191, True), (8192, False)])
def test_what_exceeds_the_pool_with_its_first_step_is_never_seated(length: int, fits: bool) -> None:
    # A prompt like that is refused at arrival: the model's length leaves room for a step (S54).
    step = plan(queue=[waiting(1, length, remote=True)], pool=128)
    assert stop(step) == (([1], StopRule.NOTHING_WAITS) if fits else ([], StopRule.NO_BLOCKS))


# --- beside others --------------------------------------------------------------------------------


@pytest.mark.covers("E62", "E63", "E68", "S22")
@pytest.mark.parametrize(
    ("num_steps", "each", "seated"),
    [pytest.param(0, 45, False, id="E62"), pytest.param(100, 39, True, id="E63")],
)
def test_growth_of_running_sequences_comes_before_admissions(
    num_steps: int, each: int, seated: bool
) -> None:
    running = [grows_45(i) for i in range(1, 5)]
    reservation = token_ratio(num_steps)
    assert [reservation.demand(view) for view in running] == [each] * 4
    candidate = waiting(9, 30 * BS, most=0)
    step = plan(running=running, queue=[candidate], pool=200, reservation=reservation)
    assert 4 * each + 30 == (210 if num_steps == 0 else 186)
    assert stop(step) == (([9], StopRule.NOTHING_WAITS) if seated else ([], StopRule.RESERVED))
    assert step.num_growth_blocks == 4 * each


@pytest.mark.covers("S22")
def test_the_candidates_own_growth_counts_once() -> None:
    running = [grows_45(1)]
    candidate = waiting(9, 64 * 10, most=1828)
    assert token_ratio().demand(decoding(9, 639, 10, most=1829)) == 20
    for pool, seated in ((45 + 10 + 20, True), (45 + 10 + 19, False)):
        step = plan(running=running, queue=[candidate], pool=pool, reservation=token_ratio())
        assert (admitted(step) == [9]) is seated
        assert step.num_growth_blocks == 45 + 20 * seated


def test_a_cached_block_that_is_claimed_is_not_there_for_the_next_candidate() -> None:
    queue, found = [waiting(1, 3 * BS + 1, most=0), waiting(2, BS, most=0)], (900, 901, 902)
    for num_available, seated in ((5, [1, 2]), (4, [1])):
        pool = Pool(num_available, evictable=frozenset(found))
        assert admitted(plan(queue=queue, pool=pool, cached={1: found})) == seated


@pytest.mark.covers("S20")
def test_a_cached_block_that_is_claimed_is_not_there_for_growth() -> None:
    candidate, found = waiting(9, 3 * BS + 1, most=0), (900, 901, 902)
    for num_available, seated in ((45 + 4, [9]), (45 + 3, [])):
        pool = Pool(num_available, evictable=frozenset(found))
        step = plan(
            running=[grows_45(1)],
            queue=[candidate],
            pool=pool,
            cached={9: found},
            reservation=token_ratio(),
        )
        assert admitted(step) == seated


@pytest.mark.covers("C13", "S20")
def test_a_block_taken_in_this_step_is_not_kept_back_a_second_time() -> None:
    # 45 blocks of growth, the first of them in this step: 44 are left to keep back.
    running = [decoding(1, 4032, 63, **GROWS_45)]
    assert token_ratio().demand(running[0]) == 45
    candidate = waiting(2, 60, most=0)
    for pool, seated in ((46, [2]), (45, [])):
        step = plan(running=running, queue=[candidate], pool=pool, reservation=token_ratio())
        assert step.chunks[1].num_new_blocks == 1
        assert admitted(step) == seated


@pytest.mark.covers("C01", "E38")
def test_speculation_does_not_cap_what_is_kept_back() -> None:
    running = [grows_45(i) for i in range(1, 65)]
    candidate = waiting(99, 16 * BS, most=0)
    assert min(64 * 45 + 16 + 1, 8192 // BS) == 128
    for k in (0, 1, 4):
        reservation = token_ratio(lookahead=k)
        needed = 64 * 45 + 16
        assert needed == 2896
        for pool, seated in ((needed, [99]), (needed - 1, []), (128, [])):
            step = plan(running=running, queue=[candidate], pool=pool, k=k, reservation=reservation)
            assert admitted(step) == seated


@pytest.mark.covers("C12", "E79", "F07")
def test_a_landed_sequence_does_not_pass_admission_again() -> None:
    landed = decoding(1, 4000, 65, most=4096)
    upstream_needs = blocks_for(int((4096 - 1) * 0.7), BS)
    assert upstream_needs == 45 > 30, "upstream: refused for its own future, and stops all behind"
    step = plan(running=[landed], queue=[waiting(2, 10)], pool=30, reservation=token_ratio())
    assert tokens(step) == {1: 1}
    assert step.chunks[1].num_new_blocks == 0
    assert step.stopped_by is StopRule.RESERVED
    full = plan(running=[landed, decoding(2, 100)], pool=0, reservation=token_ratio())
    assert tokens(full) == {1: 1, 2: 1}


@pytest.mark.covers("C14", "E80", "E81", "E82", "S48")
def test_what_is_in_flight_counts() -> None:
    landing = [in_flight_45(i) for i in range(1, 11)]
    assert sum(map(token_ratio().demand, landing)) == 450
    candidate = waiting(99, 4000, remote=True, most=4096)
    upstream_needs = 63 + 45
    assert upstream_needs <= 400, "upstream: those in flight are invisible"
    for pool, seated in ((400, []), (557, []), (558, [99])):
        step = plan(landing=landing, queue=[candidate], pool=pool, reservation=token_ratio())
        assert admitted(step) == seated
        assert step.num_growth_blocks == 450 + 45 * bool(seated)


@pytest.mark.covers("S22")
def test_a_sequence_that_still_computes_its_prompt_counts() -> None:
    running = [prefilling(1, 4032, 64, most=4096)]
    step = plan(running=running, queue=[waiting(2, 64, most=0)], pool=45, reservation=token_ratio())
    assert stop(step) == ([], StopRule.RESERVED)
    step = plan(running=running, queue=[waiting(2, 64, most=0)], pool=46, reservation=token_ratio())
    assert stop(step) == ([2], StopRule.NOTHING_WAITS)


@pytest.mark.covers("S22")
def test_those_admitted_in_this_step_count_for_the_next_candidate() -> None:
    queue = [waiting(i, 64, most=64) for i in (1, 2, 3)]
    # Each takes a block, and will need one more: the third would leave one block for three.
    step = plan(queue=queue, pool=5, reservation=policy("token_ratio", init_new_token_ratio=1.0))
    assert stop(step) == ([1, 2], StopRule.RESERVED)


def test_a_prefill_node_keeps_nothing_back_for_outputs() -> None:
    running = [prefilling(1, 4000, 64, most=0)]
    step = plan(
        running=running, queue=[waiting(2, 640, most=0)], pool=11, reservation=token_ratio()
    )
    assert stop(step) == ([2], StopRule.NOTHING_WAITS)
    assert step.num_growth_blocks == 0


@pytest.mark.covers("S26")
@pytest.mark.parametrize("name", RESERVATION_POLICIES)
def test_every_policy_decides_admissions(name: str) -> None:
    running = [grows_45(i) for i in (1, 2)]
    reservation = policy(name)
    kept = reservation.reserve(growth_columns(running)).blocks
    assert (kept > 0) is (name != "none")
    candidate = waiting(9, 60, most=0)
    for pool, seated in ((kept + 1, [9]), (kept, [])):
        assert (
            admitted(plan(running=running, queue=[candidate], pool=pool, reservation=reservation))
            == seated
        )


@pytest.mark.covers("C28", "E69")
def test_a_long_answer_is_not_reserved_in_full() -> None:
    assert blocks_for(1000 + 32768, BS) == 528
    candidate = waiting(2, 1000, most=32768)
    beside = [decoding(1, 32, 1, most=1)]
    for pool, seated in ((61, [2]), (60, [])):
        step = plan(running=beside, queue=[candidate], pool=pool, reservation=token_ratio())
        assert admitted(step) == seated


# --- a victim comes back --------------------------------------------------------------------------


@pytest.mark.covers("C11", "E83", "S24")
def test_a_victim_resumes_on_an_empty_node() -> None:
    pool, length, produced = 128, 4000, 3800
    fill = length + produced - 1
    assert fill + 512 == 8311 > pool * BS, "upstream: never resumes"
    victim = preempted(1, length + produced, output=produced, most=5000)
    step = plan(queue=[victim], pool=pool, retract=20, reservation=token_ratio())
    assert stop(step) == ([1], StopRule.NOTHING_WAITS)
    assert step.admissions[0].num_new_blocks == 122


@pytest.mark.covers("S37")
def test_a_victim_comes_back_when_everybody_can_go_on_for_a_while() -> None:
    running = [decoding(1, 100, 2), decoding(2, 100, 2)]
    victim = preempted(3, 100, output=40)
    # Two blocks for itself; 3 x 20 tokens for the steps that a preemption makes room for.
    assert blocks_for(3 * 20, BS) == 1
    for pool, seated in ((3, [3]), (2, [])):
        assert admitted(plan(running=running, queue=[victim], pool=pool, retract=20)) == seated
    assert stop(plan(running=running, queue=[victim], pool=2, retract=0)) == (
        [3],
        StopRule.NOTHING_WAITS,
    )
    assert admitted(plan(running=running, queue=[waiting(3, 100)], pool=2, retract=20)) == [3]


# --- what a policy cannot break -------------------------------------------------------------------


class Reckless(NoReservation):
    """A policy that gives away more than there is."""

    __slots__ = ()

    def demand(self, view: object) -> int:
        return -MILLION

    def total_demand(self, seated: GrowthColumns) -> int:
        return -MILLION * len(seated.num_known)


def test_a_bad_policy_cannot_give_away_what_is_not_there() -> None:
    queue = [waiting(i, 640) for i in (1, 2, 3)]
    step = plan(queue=queue, pool=21, reservation=Reckless())  # type: ignore[arg-type]
    assert stop(step) == ([1, 2], StopRule.NO_BLOCKS)
    assert sum(a.num_new_blocks for a in step.admissions) == 20
