"""The reservation that learns from outputs: its history, and the largest use to come."""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest

from engine.core.policies.learned_outputs import LearnedOutputs
from engine.core.policies.output_history import OutputHistory
from tests.support.engine.build import Engine, make_request
from tests.support.engine.planner_views import growth_columns
from tests.support.engine.policy_views import View


def learned(*lengths: int, most: int = 1024, quantile: float = 0.5) -> LearnedOutputs:
    """A policy that has seen these outputs of requests for at most `most` tokens."""
    history = OutputHistory()
    for length in lengths:
        history = history.after_output(length, most)
    return LearnedOutputs(
        quantile_ppm=round(quantile * 1_000_000),
        first_share_ppm=700_000,
        clip=4096,
        lookahead=0,
        block_size=64,
        history=history,
    )


def expected(policy: LearnedOutputs, num_output: int, most: int = 1024) -> int:
    view = View(num_known=num_output, num_output=num_output, max_new_tokens=most)
    (found,) = policy.expected(growth_columns([view])).tolist()
    assert policy.expected_of(view) == found
    return int(found)


def test_without_outputs_a_share_is_expected_as_by_other_policies() -> None:
    assert expected(learned(), 0) == 717
    assert expected(learned(*[100] * 7), 24) == 700
    assert expected(learned(*[100] * 8), 24) == 76


def test_the_quantile_is_that_of_the_outputs_that_became_longer() -> None:
    policy = learned(*range(10, 110, 10))
    assert expected(policy, 0) == 60
    assert expected(policy, 60) == 90 - 60
    assert expected(policy, 99) == 1
    assert expected(learned(*range(10, 110, 10), quantile=0.9), 0) == 100
    assert expected(learned(*range(10, 110, 10), quantile=1.0), 0) == 100
    assert expected(learned(*range(10, 110, 10), quantile=0.0), 0) == 10


def test_an_output_longer_than_all_before_goes_on_for_a_while_and_never_past_its_limit() -> None:
    policy = learned(*[10] * 8)
    assert expected(policy, 10) == 16
    assert expected(policy, 500) == 250
    assert expected(policy, 1000) == 24
    assert expected(policy, 1024) == expected(policy, 2000) == 0


def test_requests_with_other_limits_have_outputs_of_their_own() -> None:
    history = OutputHistory()
    for _ in range(8):
        history = history.after_output(20, 200).after_output(900, 8000)
    policy = learned()
    policy = LearnedOutputs(1_000_000, 700_000, 4096, 0, 64, history)
    assert expected(policy, 0, most=250) == 20
    assert expected(policy, 0, most=5000) == 900
    # All together speak for a class that has too few of its own.
    assert expected(policy, 0, most=1000) == 900
    assert expected(policy, 0, most=30) == 30


def test_the_latest_outputs_count() -> None:
    history = OutputHistory()
    for length in [500] * 300 + [20] * 256:
        history = history.after_output(length, 1000)
    assert {len(lengths) for lengths in history.recent if lengths} == {256}
    assert {length for lengths in history.recent for length in lengths} == {20}
    assert len(history.keys) == 2 * 256
    assert expected(LearnedOutputs(1_000_000, 700_000, 4096, 0, 64, history), 0) == 20


def test_what_is_known_of_outputs_is_sorted_and_complete_however_they_come() -> None:
    history, draw = OutputHistory(), random.Random(3)
    for _ in range(1500):
        most = draw.choice((7, 60, 900, 5000))
        history = history.after_output(draw.randrange(1, most + 1), most)
    keys = [(n << 40) + one for n, lengths in enumerate(history.recent) for one in sorted(lengths)]
    assert history.keys.tolist() == keys
    assert history.key_ends.tolist() == list(accumulate(map(len, history.recent)))
    assert history.used_class.tolist() == [n if one else 0 for n, one in enumerate(history.recent)]


@pytest.mark.parametrize(
    ("others", "blocks"),
    [
        # 100 tokens in two blocks, 100 to come: with three quarters of a block, four.
        ([View(num_known=100, num_held_blocks=2, max_new_tokens=100)], 2),
        # When the first ends with 110 tokens, the second has 200 of 384; then it goes on alone.
        (
            [
                View(num_known=100, num_held_blocks=2, max_new_tokens=10),
                View(num_known=190, num_held_blocks=3, max_new_tokens=170),
            ],
            2,
        ),
        ([View(num_known=190, num_held_blocks=3, max_new_tokens=170)], 4),
        # One that leaves after its prompt gives nothing back that could be counted on.
        ([View(num_known=6400, num_held_blocks=100, max_new_tokens=0)], 0),
        ([], 0),
    ],
)
def test_the_largest_use_to_come_is_kept_back(others: list[View], blocks: int) -> None:
    # Everything that is allowed is expected.
    policy = LearnedOutputs(1_000_000, 1_000_000, 4096, 0, 64, OutputHistory())
    assert policy.reserve(growth_columns(others)).blocks == blocks


def test_drafts_take_slots_too() -> None:
    views = [View(num_known=64, num_held_blocks=1, max_new_tokens=16)]
    blocks = {}
    for lookahead in (0, 63):
        policy = LearnedOutputs(1_000_000, 1_000_000, 4096, lookahead, 64, OutputHistory())
        blocks[lookahead] = policy.reserve(growth_columns(views)).blocks
    assert blocks == {0: 1, 63: 2}


@pytest.mark.covers("S26")
def test_only_outputs_that_end_by_themselves_are_learned_and_kept_when_idle() -> None:
    engine = Engine(reservation_policy="learned")

    def lengths() -> list[tuple[int, ...]]:
        reservation = engine.scheduler.reservation
        assert isinstance(reservation, LearnedOutputs)
        return sorted(lengths for lengths in reservation.history.recent if lengths)

    aborted = engine.add(make_request(4, seed=1, max_tokens=9, ignore_eos=True))
    exported = engine.add(make_request(4, seed=2, max_tokens=1), is_exported=True)
    engine.add(make_request(4, seed=3, max_tokens=6, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.scheduler.finish(aborted)
    engine.run()
    engine.scheduler.release(exported)
    assert not engine.scheduler.running
    assert lengths() == [(6,), (6,)]
    engine.add(make_request(4, seed=4, max_tokens=2, ignore_eos=True))
    engine.run()
    assert (6, 2) in lengths()


def test_a_long_history_predicts_as_one_that_is_made_of_its_latest_outputs() -> None:
    """Outputs come and go one by one, and their order by length is kept."""
    lengths = [(index * 7919) % 601 for index in range(700)]
    history, latest = OutputHistory(), OutputHistory()
    for length in lengths:
        history = history.after_output(length, 1000)
    for length in lengths[-256:]:
        latest = latest.after_output(length, 1000)
    num_output = np.arange(0, 700, 7)
    max_new_tokens = np.full(len(num_output), 1000)
    for quantile_ppm in (1, 500_000, 1_000_000):
        found = history.remaining(num_output, max_new_tokens, quantile_ppm).tolist()
        assert found == latest.remaining(num_output, max_new_tokens, quantile_ppm).tolist()
        longer = [sorted(one for one in lengths[-256:] if one > has) for has in num_output]
        index = [min(len(one) * quantile_ppm // 1_000_000, len(one) - 1) for one in longer]
        known = [n for n, one in enumerate(longer) if one]
        assert [found[n] for n in known] == [longer[n][index[n]] - num_output[n] for n in known]
