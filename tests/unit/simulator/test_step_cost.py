"""The cost model's arithmetic, number by number."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of
from simulator.step_cost import StepCost

COST = StepCost(
    overhead_s=1000.0, weights_s=40.0, token_s=1.0, context_s=0.01, pair_s=0.001, block_copy_s=0.5
)


def scheduled(start: int, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(0, [0] * num_tokens, start, [], None)


@pytest.mark.parametrize(
    ("batch", "num_copied", "seconds"),
    [
        ([], 0, 1040.0),
        ([scheduled(99, 1)], 0, 1041.0),  # 100 tokens of context
        ([scheduled(99, 1), scheduled(299, 1)], 0, 1044.0),
        ([scheduled(0, 100)], 0, 1105.05),  # 1 + 2 + … + 100 pairs
        ([scheduled(50, 10)], 0, 1040.555),  # 51 + 52 + … + 60 pairs, bound by the weights
        ([scheduled(0, 100), scheduled(99, 1)], 0, 1107.05),
        ([scheduled(99, 1)], 6, 1044.0),
    ],
)
def test_a_step_costs_passes_tokens_context_pairs_and_copies(
    batch: list[ScheduledSequence], num_copied: int, seconds: float
) -> None:
    assert COST.step_s(batch_of(batch), num_copied) == pytest.approx(seconds)


def test_decodes_that_follow_each_other_end_when_each_of_them_would() -> None:
    """Times are compared bit by bit: a jump must not move anything."""
    cost, now_s, context = StepCost(), 17.3, 4321
    expected = []
    for step in range(5):
        now_s += cost.seconds(3, context + 3 * step)
        expected.append(now_s)
    assert cost.ends_of_decodes(17.3, 3, context, 5) == expected


def test_the_defaults_are_an_8b_model_on_a_mid_size_gpu() -> None:
    cost = StepCost()
    assert cost.step_s(batch_of([scheduled(999, 1)])) == pytest.approx(0.01208)
    batch = [scheduled(999, 1) for _ in range(64)]
    assert cost.step_s(batch_of(batch)) == pytest.approx(0.012 + 64_000 * 80e-9)
    assert cost.step_s(batch_of([scheduled(0, 2048)])) == pytest.approx(
        0.002 + 0.17408 + 0.0063, abs=1e-4
    )


def test_attention_counts_as_in_the_cost_model() -> None:
    assert StepCost().pairs_per_token == 28_333
    assert COST.pairs_per_token == 1000
    assert StepCost(pair_s=0.0).pairs_per_token == 0


def test_numbers_can_be_replaced() -> None:
    cost = StepCost().with_settings(["token_s=1e-4", "overhead_s=0"])
    assert (cost.token_s, cost.overhead_s, cost.weights_s) == (1e-4, 0.0, StepCost().weights_s)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("speed=1", "'speed=1': wanted one of block_copy_s, context_s"),
        ("token_s", "wanted token_s=SECONDS"),
        ("token_s=fast", "wanted token_s=SECONDS"),
        ("token_s=-1", "0 or more"),
        ("token_s=nan", "0 or more"),
    ],
)
def test_a_bad_number_is_named(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StepCost().with_settings([setting])
