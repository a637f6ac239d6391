"""The ratio over time: after preemptions, by decode steps, and on an idle node."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from common.settings.config import SchedulingConfig
from engine.core.policies.growth import MILLION
from engine.core.policies.new_token_ratio import estimated_ratio_ppm
from engine.core.policies.reservation import make_reservation
from tests.support.engine.policy_views import BLOCK_SIZE, View, policy

STEPS_TO_HALF, STEPS_TO_015 = 200, 550
NAMES = ("token_ratio", "global_ratio")


def upstream_ratio(num_left: int, num_output: int, max_tokens: int) -> float:
    """FastDeploy: nothing is clipped, the lower bound is missing, and so is the old value."""
    produced = num_left * (num_output + 16 * BLOCK_SIZE)
    return min(produced / (num_left * max_tokens + 1), 0.7)


def decodes(max_tokens: int) -> list[View]:
    return [View(num_output=500, max_new_tokens=max_tokens)] * 32


@pytest.mark.covers("E50")
def test_a_preemption_raises_the_ratio_to_its_first_value_at_most() -> None:
    old = policy("token_ratio", num_steps=STEPS_TO_015)
    assert old.ratio == 0.15
    assert Fraction(32 * 500 + 32 * 1024, 32 * 1024 + 1) > 1
    assert old.after_preemption(decodes(1024)).ratio == 0.7


@pytest.mark.covers("C02", "E51", "S29")
@pytest.mark.parametrize(
    ("max_tokens", "blocks_each", "upstream"),
    [(4096, 21, (0.3721, 21)), (32768, 24, (0.0465, 3)), (131072, 24, (0.0116, 1))],
    ids=["E51 4096", "E51 32768", "E51 131072"],
)
def test_long_outputs_do_not_make_the_ratio_vanish(
    max_tokens: int, blocks_each: int, upstream: tuple[float, int]
) -> None:
    ratio = upstream_ratio(32, 500, max_tokens)
    blocks = math.ceil(int(min(max_tokens - 500, 4096) * ratio) / BLOCK_SIZE)
    assert (round(ratio, 4), blocks) == upstream
    after = policy("token_ratio", num_steps=STEPS_TO_015).after_preemption(decodes(max_tokens))
    assert after.ratio == pytest.approx(0.3721, abs=5e-5)
    assert after.demand(decodes(max_tokens)[0]) == blocks_each


@pytest.mark.covers("C02", "E52", "S28")
@pytest.mark.parametrize(
    ("max_tokens", "blocks_each"),
    [(4096, 29), (32768, 32), (131072, 32)],
    ids=["E52 4096", "E52 32768", "E52 131072"],
)
def test_a_preemption_never_lowers_the_ratio(max_tokens: int, blocks_each: int) -> None:
    assert upstream_ratio(32, 500, max_tokens) < 0.5
    after = policy("token_ratio", num_steps=STEPS_TO_HALF).after_preemption(decodes(max_tokens))
    assert after.ratio == 0.5
    assert after.demand(decodes(max_tokens)[0]) == blocks_each


@pytest.mark.covers("E53")
@pytest.mark.parametrize("name", NAMES)
def test_with_nobody_left_the_ratio_is_the_first_one(name: str) -> None:
    assert policy(name, num_steps=STEPS_TO_015).after_preemption([]).ratio == 0.7


@pytest.mark.covers("B13", "E54", "S29")
def test_decoding_sequences_alone_enter_both_sums() -> None:
    left = [View(num_output=100, max_new_tokens=1000), View(num_output=300, max_new_tokens=1000)]
    assert round((400 + 2 * 1024) / (4 * 1000 + 1), 4) == 0.6118  # FastDeploy
    assert round((400 + 4 * 20) / (4 * 1000 + 1), 2) == 0.12  # SGLang
    assert policy("token_ratio", num_steps=590).after_preemption(left).ratio == 0.7
    after = policy("global_ratio", num_steps=600).after_preemption(left)
    assert after.ratio == pytest.approx(0.2199, abs=5e-5)


@pytest.mark.covers("E55")
@pytest.mark.parametrize(
    ("max_tokens", "ratio"),
    [(1024, 0.5078), (4096, 0.127), (32768, 0.127)],
    ids=["E55 1024", "E55 4096", "E55 32768, clipped here"],
)
def test_the_global_ratio_expects_as_many_tokens_as_room_was_made_for(
    max_tokens: int, ratio: float
) -> None:
    after = policy("global_ratio", num_steps=600).after_preemption(decodes(max_tokens))
    assert after.ratio == pytest.approx(ratio, abs=5e-5)


def test_unless_it_is_set_the_number_of_further_tokens_follows_the_block_size() -> None:
    config = SchedulingConfig(reservation_policy="token_ratio")
    for block_size in (16, 64):
        reservation = make_reservation(config, block_size=block_size, lookahead=0)
        for _ in range(600):
            reservation = reservation.after_decode_step()
        after = reservation.after_preemption(decodes(4096))
        assert after.ratio == pytest.approx((500 + 16 * block_size) / 4096, abs=5e-4)


@pytest.mark.covers("B24")
def test_the_knobs_of_the_estimate_are_read() -> None:
    left = decodes(4096)
    fewer = policy("token_ratio", num_steps=600, retract_extra_tokens=0).after_preemption(left)
    assert fewer.ratio == pytest.approx(500 / 4096, abs=5e-5)
    shorter = policy("token_ratio", num_steps=600, clip_max_new_tokens=3000).after_preemption(left)
    assert shorter.ratio == pytest.approx(1524 / 3000, abs=5e-5)
    # The number of steps comes from the configuration.
    longer = policy("global_ratio", num_steps=600, retract_decode_steps=100).after_preemption(left)
    assert longer.ratio == pytest.approx(600 / 4096, abs=5e-5)


def test_the_estimate_is_rounded_up_to_a_millionth() -> None:
    left = [View(num_output=1, max_new_tokens=2)]
    assert estimated_ratio_ppm(left, 4096, 0) == 333_334
    assert estimated_ratio_ppm(left, 4096, 2) == MILLION
    assert estimated_ratio_ppm([], 4096, 2) == MILLION


@pytest.mark.covers("C31")
def test_with_drafts_the_same_steps_produce_more() -> None:
    # SGLang keeps 512 tokens back for each: 512 steps without drafts, 128 with three accepted.
    assert 512 // 4 == 128
    after = policy("global_ratio", num_steps=600, lookahead=3).after_preemption(decodes(4096))
    assert after.ratio == pytest.approx((500 + 20 * 4) / 4096, abs=5e-5)


@pytest.mark.covers("E56")
def test_the_ratio_falls_in_a_straight_line() -> None:
    assert policy("token_ratio", num_steps=599).ratio == 0.101
    assert policy("token_ratio", num_steps=600).ratio == 0.1
    assert policy("token_ratio", num_steps=10_000).ratio == 0.1


@pytest.mark.covers("E57")
def test_the_global_ratio_falls_to_its_share_of_the_first_value() -> None:
    assert policy("global_ratio", num_steps=100).ratio == pytest.approx(0.5997, abs=5e-5)
    assert policy("global_ratio", num_steps=600).ratio == 0.098


@pytest.mark.covers("B25", "E58")
@pytest.mark.parametrize(
    ("name", "settings", "floor", "num_steps"),
    [
        ("global_ratio", {"min_new_token_ratio_factor": 0.14}, 0.098, 201),
        ("token_ratio", {"min_new_token_ratio": 0.14}, 0.14, 187),
    ],
    ids=["E58 to 0.098", "E58 to 0.14"],
)
def test_the_knob_is_the_number_of_steps(
    name: str, settings: dict[str, Any], floor: float, num_steps: int
) -> None:
    assert math.ceil((0.7 - floor) / 0.003) == num_steps
    settings = {**settings, "new_token_ratio_decay_steps": num_steps}
    before = policy(name, num_steps=num_steps - 1, **settings)
    assert before.ratio > floor
    assert before.after_decode_step().ratio == floor


@pytest.mark.covers("B23", "C26", "E59", "S31")
@pytest.mark.parametrize("name", NAMES)
def test_no_decay_steps_mean_no_decay(name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        (0.7 - 0.098) / 0
    still = policy(name, num_steps=1000, new_token_ratio_decay_steps=0)
    assert still.ratio == 0.7
    negative = SchedulingConfig(reservation_policy=name, new_token_ratio_decay_steps=-600)
    assert 0.7 - (0.7 - 0.098) / -600 > 0.7
    (problem,) = negative.problems()
    assert problem.text == "new_token_ratio_decay_steps is -600: wanted 0 or more"


@pytest.mark.covers("E60")
def test_conservativeness_moves_both_ends() -> None:
    first = policy("global_ratio", schedule_conservativeness=0.3)
    assert first.ratio == 0.21
    assert first.after_decode_step().ratio == pytest.approx(0.21 - 0.000301)
    assert policy("global_ratio", schedule_conservativeness=0.3, num_steps=600).ratio == 0.0294
    assert policy("global_ratio", schedule_conservativeness=9.0).ratio == 1.0
    # It is no knob of the other policy.
    assert policy("token_ratio", schedule_conservativeness=0.3).ratio == 0.7


@pytest.mark.covers("E61")
@pytest.mark.parametrize("name", NAMES)
def test_an_idle_node_starts_anew(name: str) -> None:
    worn = policy(name, num_steps=123)
    assert worn.ratio < 0.7
    assert worn.when_idle() == policy(name)
    # A raised ratio falls again from where it is, not from where it was.
    raised = policy(name, num_steps=600).after_preemption(decodes(4096))
    assert raised.ratio > raised.after_decode_step().ratio > policy(name, num_steps=600).ratio
    assert raised.when_idle() == policy(name)


def test_a_raised_ratio_falls_at_the_same_speed() -> None:
    raised = policy("token_ratio", num_steps=600).after_preemption(decodes(4096))
    later = raised
    for _ in range(100):
        later = later.after_decode_step()
    assert raised.ratio - later.ratio == pytest.approx(0.1)


@pytest.mark.covers("S27")
def test_a_raised_ratio_stops_at_the_lowest_one() -> None:
    raised = policy("token_ratio", num_steps=1, new_token_ratio_decay_steps=1)
    assert raised.ratio == 0.1
    raised = raised.after_preemption(decodes(4096))
    assert raised.ratio == pytest.approx(0.3721, abs=5e-5)
    lowest = raised.after_decode_step()
    assert lowest.ratio == 0.1
    assert lowest.after_decode_step() is lowest


@pytest.mark.covers("S29")
def test_an_output_beyond_the_clip_counts_as_much_as_the_clip() -> None:
    left = [View(num_output=5000), View(num_output=0)]
    after = policy("token_ratio", num_steps=600, retract_extra_tokens=0).after_preemption(left)
    assert after.ratio == pytest.approx(4096 / (2 * 4096 + 1), abs=1e-6)


def test_a_preemption_that_teaches_nothing_does_not_stop_the_fall_half_way() -> None:
    worn = policy("token_ratio", num_steps=STEPS_TO_HALF)
    assert worn.after_preemption(decodes(4096)).after_decode_step().ratio == 0.499


def test_the_first_ratio_may_be_the_lowest() -> None:
    config = SchedulingConfig(
        reservation_policy="token_ratio", init_new_token_ratio=0.5, min_new_token_ratio=0.5
    )
    reservation = make_reservation(config, block_size=BLOCK_SIZE, lookahead=0)
    assert reservation.after_decode_step().ratio == 0.5
    assert reservation.after_preemption([]).ratio == 0.5
