"""Blocks that a sequence is expected to need: the examples, and the upstream formulas beside."""

from __future__ import annotations

import math

import pytest

from common.kv.blocks import blocks_for
from engine.core.policies.growth import growth_blocks, growth_tokens, to_millionths
from tests.support.engine.policy_views import BLOCK_SIZE, View, policy

CLIP = 4096


def tokens_and_blocks(view: View, ratio: float) -> tuple[int, int]:
    ppm = to_millionths(ratio)
    return (
        growth_tokens(view, ppm, CLIP, 0),
        growth_blocks(view, ppm, CLIP, 0, BLOCK_SIZE),
    )


@pytest.mark.covers("B14", "E31", "E32", "E33", "E34", "E35", "E36", "E37", "S20", "S21")
@pytest.mark.parametrize(
    ("view", "ratio", "expected"),
    [
        pytest.param(View(max_new_tokens=32768), 0.7, (2868, 45), id="E31"),
        pytest.param(View(max_new_tokens=32768), 0.1, (410, 7), id="E32"),
        pytest.param(View(max_new_tokens=100, num_output=40), 0.7, (42, 1), id="E33"),
        pytest.param(View(max_new_tokens=100, num_output=105), 0.7, (0, 0), id="E34"),
        # No max_tokens: the model's length leaves 8192 - 1000.
        pytest.param(View(max_new_tokens=7192, num_output=200), 0.5, (2048, 32), id="E35"),
        pytest.param(
            View(max_new_tokens=641, num_known=64, num_held_blocks=1), 0.1, (65, 2), id="E36"
        ),
        pytest.param(
            View(num_known=4001, num_output=1, num_held_blocks=65), 0.7, (2868, 43), id="E37"
        ),
        pytest.param(View(max_new_tokens=0, num_known=64, num_held_blocks=1), 1, (0, 0), id="P"),
    ],
)
def test_growth(view: View, ratio: float, expected: tuple[int, int]) -> None:
    assert tokens_and_blocks(view, ratio) == expected


@pytest.mark.covers("E40")
@pytest.mark.parametrize(
    ("remaining", "ratio", "exact"), [(50, 0.14, 7), (100, 0.07, 7), (90, 0.7, 63)]
)
def test_shares_are_exact(remaining: int, ratio: float, exact: int) -> None:
    assert (math.ceil(remaining * ratio), int(remaining * ratio)) != (exact, exact)
    assert tokens_and_blocks(View(max_new_tokens=remaining), ratio)[0] == exact


@pytest.mark.covers("C01", "E38")
def test_speculation_does_not_cap_the_reservation_at_one_sequence() -> None:
    running, candidate = [View()] * 64, 16
    upstream = min(64 * 45 + candidate + 1, 8192 // BLOCK_SIZE)
    assert upstream == 128
    for num_drafts, blocks_each in ((0, 45), (1, 45), (12, 45), (13, 46)):
        reservation = policy("token_ratio", lookahead=num_drafts)
        demand = sum(map(reservation.demand, running))
        assert reservation.blocks(demand) + candidate == 64 * blocks_each + candidate
    assert 64 * 45 + candidate == 2896


@pytest.mark.covers("C13")
def test_blocks_held_already_are_not_counted_again() -> None:
    landed = View(num_known=4001, num_output=1, num_held_blocks=65)
    assert blocks_for(int(min(32767, CLIP) * 0.7), BLOCK_SIZE) == 45
    assert 65 * BLOCK_SIZE - landed.num_known == 159
    assert policy("token_ratio").demand(landed) == 43
    assert policy("global_ratio").demand(landed) == 2868 - 159


@pytest.mark.covers("B22", "C15")
def test_the_share_is_rounded_up_before_blocks_are() -> None:
    assert blocks_for(int(641 * 0.1), BLOCK_SIZE) == 1
    assert 63 // BLOCK_SIZE == 0
    assert tokens_and_blocks(View(max_new_tokens=641), 0.1) == (65, 2)
    assert tokens_and_blocks(View(max_new_tokens=63), 1.0) == (63, 1)


@pytest.mark.covers("C28", "E69")
def test_a_candidate_is_clipped_and_shared_like_everybody() -> None:
    assert blocks_for(1000 + 32768, BLOCK_SIZE) == 528
    prompt_blocks = blocks_for(1000, BLOCK_SIZE)
    seated = View(num_known=1000, num_held_blocks=prompt_blocks)
    assert prompt_blocks + policy("token_ratio").demand(seated) == 61


@pytest.mark.covers("C29", "S21")
def test_what_was_produced_is_taken_off_before_the_clip() -> None:
    assert max(min(32768, CLIP) - 5000, 0) == 0
    assert tokens_and_blocks(View(num_output=5000), 1.0)[0] == 4096


def test_drafts_have_slots_but_never_past_the_last_token() -> None:
    assert growth_tokens(View(max_new_tokens=100), 100_000, CLIP, 4) == 14
    assert growth_tokens(View(max_new_tokens=12), 900_000, CLIP, 4) == 12
    assert growth_tokens(View(max_new_tokens=5, num_output=5), 900_000, CLIP, 4) == 0
    assert growth_tokens(View(max_new_tokens=5000), 1_000_000, CLIP, 4) == 4100


def test_the_smallest_share_is_not_rounded_away() -> None:
    assert to_millionths(1e-9) == 1
    assert to_millionths(0.0) == 0
    assert to_millionths(0.0249999) == 25_000
