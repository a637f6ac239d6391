"""Whether a pull pays at small sizes, where a step costs less than the widest one."""

from __future__ import annotations

from functools import partial

import pytest

from engine.core.runner_contract import StepCosts
from node.flow.pulls.pull_cost import BYTES_PER_S, FIXED_S, PullCost
from node.flow.step_progress import expected_step_s
from tests.support.nodes.timed_pulls import on_pulled

COSTS = StepCosts((8, 64), (0.5 * FIXED_S, 4.0 * FIXED_S))


@pytest.mark.parametrize(
    ("num_tokens", "num_before", "is_worth"),
    [(4, 0, False), (8, 0, False), (15, 0, False), (17, 0, True), (64, 0, True), (8, 9, True)],
)
def test_a_small_prefix_is_pulled_only_where_computing_it_takes_longer(
    num_tokens: int, num_before: int, is_worth: bool
) -> None:
    """A pull takes a fixed time and little more, which a step of 16 tokens takes too."""
    cost = PullCost(1e-9 * BYTES_PER_S, partial(expected_step_s, COSTS))
    assert cost.is_worth(num_tokens, num_before) is is_worth


TOKEN_S = 1e-4
"""Computing a token takes so long."""


def pulling(num_tokens: int, took_s: float) -> PullCost:
    """A rule that has learned that a pull of so many tokens takes so long."""
    cost = PullCost(1e-9 * BYTES_PER_S, lambda num: num * TOKEN_S)
    on_pulled(cost, num_tokens, took_s)
    return cost


def test_a_source_should_answer_in_the_middle_of_the_step_that_it_computes() -> None:
    cost = pulling(1000, 0.01)
    assert cost.expected_s(1000) == pytest.approx(0.01, rel=1e-3)
    for num_at_source in (1, 2000):
        added_s = cost.expected_s(1000, num_at_source) - cost.expected_s(1000)
        assert added_s == pytest.approx(0.5 * num_at_source * TOKEN_S)


@pytest.mark.parametrize(("num_at_source", "is_worth"), [(0, True), (1750, True), (1850, False)])
def test_a_pull_from_a_busy_source_ends_later(num_at_source: int, is_worth: bool) -> None:
    cost = pulling(1000, 0.01)
    assert cost.is_worth(1000, num_at_source=num_at_source) is is_worth
    assert not pulling(1000, 0.01).is_worth(900, num_at_source=1850)
    assert pulling(1000, 0.01).is_worth(900, 150, num_at_source=1850)


def test_what_sources_have_to_do_hinders_no_pull_for_ever() -> None:
    """A pull that is not tried shows nothing of a source either."""
    cost = pulling(1000, 0.01)
    declined = 0
    while not cost.is_worth(1000, num_at_source=8000):
        declined += 1
    assert 10 < declined < 40
    assert cost.expected_s(1000) < 0.01


def test_what_part_of_a_step_is_waited_for_is_learned_from_pulls_that_were_quicker() -> None:
    """Much of what a router counts on a node is cached there."""
    cost = pulling(1000, 0.01)
    for _ in range(20):
        on_pulled(cost, 1000, 0.02, 4000)
    assert cost.expected_s(1000, 4000) == pytest.approx(0.02, rel=0.2)
    assert cost.expected_s(1000) > 0.005


def test_a_source_that_was_busy_says_little_of_the_link() -> None:
    cost, alone = pulling(1000, 0.01), pulling(1000, 0.01)
    for _ in range(20):
        on_pulled(cost, 1000, 0.12, 2000)
        on_pulled(alone, 1000, 0.12)
    assert cost.expected_s(1000) < 0.02
    assert alone.expected_s(1000) > 0.1


def test_no_source_takes_longer_than_its_step_to_answer() -> None:
    cost = pulling(1000, 0.01)
    for _ in range(50):
        on_pulled(cost, 1000, 100.0, 1000)
    assert cost.expected_s(1000, 1000) - cost.expected_s(1000) == pytest.approx(1000 * TOKEN_S)


def standing_still(cost: PullCost, num_pulls: int) -> None:
    """So many pulls are under way while the node, or what they come by, stands still for 20 s."""
    for number in range(num_pulls):
        cost.on_pulled(1000, 100.0 + number / 100, 120.0 + number / 100)


@pytest.mark.parametrize("num_pulls", [1, 2, 8, 30])
def test_pulls_that_a_standstill_has_delayed_together_count_as_one(num_pulls: int) -> None:
    cost = pulling(1000, 0.01)
    before_s = cost.expected_s(1000)
    standing_still(cost, num_pulls)
    assert cost.expected_s(1000) <= 2 * before_s
    # The first one that is as quick as before shows it.
    cost.on_pulled(1000, 130.0, 130.01)
    assert cost.expected_s(1000) <= 1.5 * before_s


def test_a_pull_that_pays_is_tried_again_soon_after_a_standstill() -> None:
    cost = pulling(1000, 0.06)
    assert cost.is_worth(1000)
    standing_still(cost, 8)
    declined = 0
    while not cost.is_worth(1000):
        declined += 1
    assert declined < 10


def test_a_link_that_is_slow_for_good_is_soon_known_to_be() -> None:
    """Pulls begin two at a time: of each two, one raises what is expected."""
    cost = pulling(1000, 0.01)
    for turn in range(8):
        for began_at_s in (100.0 + 10 * turn, 100.5 + 10 * turn):
            cost.on_pulled(1000, began_at_s, began_at_s + 1.0)
    assert cost.expected_s(1000) > 0.2


def test_pulls_at_once_that_are_a_little_slower_all_count() -> None:
    cost, alone = pulling(1000, 0.01), pulling(1000, 0.01)
    for number in range(8):
        cost.on_pulled(1000, 100.0 + number / 1000, 100.03 + number / 1000)
        on_pulled(alone, 1000, 0.03)
    assert cost.expected_s(1000) == pytest.approx(alone.expected_s(1000))
