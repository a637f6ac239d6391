"""Whether a pull pays at small sizes, where a step costs less than the widest one."""

from __future__ import annotations

from functools import partial

import pytest

from engine.core.runner_contract import StepCosts
from node.flow.pulls.pull_cost import BYTES_PER_S, FIXED_S, PullCost
from node.flow.step_progress import expected_step_s

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
