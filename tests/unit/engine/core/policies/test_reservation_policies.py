"""The policies side by side: their units, their states, and how they are chosen."""

from __future__ import annotations

import pytest

from common.settings.config import SchedulingConfig
from engine.core.policies.reservation import (
    RESERVATION_POLICIES,
    FixedBlocks,
    GlobalRatio,
    LearnedOutputs,
    NoReservation,
    TokenRatio,
)
from pdserve.configuration.options import all_options
from tests.support.engine.planner_views import growth_columns
from tests.support.engine.policy_views import View, policy


@pytest.mark.covers("S26")
def test_every_name_of_the_configuration_is_a_policy() -> None:
    names = all_options()["reservation_policy"].declared.one_of
    assert [type(policy(name)) for name in names] == [
        NoReservation,
        FixedBlocks,
        TokenRatio,
        GlobalRatio,
        LearnedOutputs,
    ]
    assert isinstance(policy(SchedulingConfig().reservation_policy), LearnedOutputs)


def test_none_keeps_nothing_back() -> None:
    reservation = policy("none")
    assert reservation.blocks(reservation.demand(View())) == 0
    assert reservation.ratio == 0.0
    for same in (
        reservation.after_decode_step(),
        reservation.after_preemption([View()]),
        reservation.when_idle(),
    ):
        assert same == reservation


@pytest.mark.covers("E39")
def test_fixed_blocks() -> None:
    running, candidate = [View()] * 64, 16
    reservation = policy("fixed_blocks")
    assert reservation.blocks(sum(map(reservation.demand, running))) + candidate == 1040
    reservation = reservation.after_decode_step()
    assert reservation.blocks(sum(map(reservation.demand, running))) + candidate == 976


def upstream_reserve(num_rounds: int) -> int:
    """FastDeploy's reserve after a preemption: a float that is decreased and cut off."""
    reserve = 16.0
    for _ in range(num_rounds):
        reserve -= 0.025
    return max(int(reserve), 0)


@pytest.mark.covers("C22")
def test_fixed_blocks_hold_from_the_start_and_decay_exactly() -> None:
    view = View()
    is_relaxed_at_start = True
    assert (0 if is_relaxed_at_start else 16) == 0
    assert policy("fixed_blocks").demand(view) == 16
    after = policy("fixed_blocks", num_steps=100).after_preemption([view])
    assert (upstream_reserve(1), after.demand(view)) == (15, 16)
    assert after == policy("fixed_blocks")
    assert upstream_reserve(600) == 0
    assert policy("fixed_blocks", num_steps=600).demand(view) == 1
    assert policy("fixed_blocks", num_steps=601).demand(view) == 0
    last = policy("fixed_blocks", num_steps=640)
    assert last.after_decode_step() is last


def test_fixed_blocks_have_a_floor_and_an_idle_start() -> None:
    name = "reserve_min_output_block_num_for_decode_when_schedule_new_prefill"
    worn = policy("fixed_blocks", num_steps=1000, **{name: 3})
    assert worn.demand(View()) == 3
    assert worn.when_idle().demand(View()) == 16
    assert worn.ratio == 0.0


def test_fixed_blocks_are_never_more_than_a_sequence_can_still_use() -> None:
    reservation = policy("fixed_blocks")
    assert reservation.demand(View(max_new_tokens=65)) == 2
    assert reservation.demand(View(num_known=64, num_held_blocks=2, max_new_tokens=64)) == 0
    # A sequence that leaves after its prompt grows no further here.
    assert reservation.demand(View(num_known=64, num_held_blocks=1, max_new_tokens=0)) == 0


def test_fixed_blocks_are_for_those_that_run_and_not_for_a_candidate() -> None:
    reserve = policy("fixed_blocks").reserve(growth_columns([View()]))
    assert (reserve.blocks, reserve.blocks_with(View())) == (16, 16)
    assert reserve.plus(View()).blocks == 32


def test_the_global_ratio_rounds_the_sum_up_once() -> None:
    views = [View(max_new_tokens=10)] * 64
    each, together = policy("token_ratio"), policy("global_ratio")
    assert each.blocks(sum(map(each.demand, views))) == 64
    assert together.blocks(sum(map(together.demand, views))) == 7
    assert together.blocks(1) == 1
    assert together.blocks(0) == 0


def test_the_global_ratio_uses_free_slots_first() -> None:
    reservation = policy("global_ratio")
    assert reservation.demand(View(num_known=60, num_held_blocks=1, max_new_tokens=10)) == 3
    assert reservation.demand(View(num_known=50, num_held_blocks=1, max_new_tokens=10)) == 0


@pytest.mark.parametrize("name", RESERVATION_POLICIES)
def test_policies_are_values(name: str) -> None:
    def lived() -> object:
        used = policy(name, num_steps=7, lookahead=3)
        return used.after_preemption([View(num_output=9)]).after_decode_step()

    assert lived() == lived()
    assert hash(lived()) == hash(lived())


@pytest.mark.parametrize(("name", "demands"), [("token_ratio", (1, 2)), ("global_ratio", (64, 65))])
def test_lookahead_counts(name: str, demands: tuple[int, int]) -> None:
    view = View(num_known=64, num_held_blocks=1, max_new_tokens=1000)
    without, with_drafts = (
        policy(name, lookahead=k, init_new_token_ratio=0.064, min_new_token_ratio=0.01)
        for k in (0, 1)
    )
    assert (without.demand(view), with_drafts.demand(view)) == demands
