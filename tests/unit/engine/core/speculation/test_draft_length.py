"""How many drafts pay, on step times measured with the demo model on two CPU cores."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.runner_contract import StepCosts
from engine.core.speculation.draft_length import (
    CHANCE_DISCOUNT,
    PROBE_SHARE,
    Acceptance,
    DraftLength,
    moving_average,
)
from tests.support.engine.speculation_views import COSTS, MTP_COSTS, powers


def rate(costs: StepCosts, chances: list[list[float]], lengths: list[int]) -> float:
    """Expected tokens per second of a step with the first `lengths` drafts."""
    gained = sum(CHANCE_DISCOUNT * sum(c[:n]) for c, n in zip(chances, lengths, strict=True))
    rows = len(chances) + sum(lengths)
    step_s = DraftLength(costs, 0).cost_s(rows) + sum(lengths) * costs.draft_s
    return (len(chances) + gained) / step_s


@pytest.mark.parametrize(
    ("num_sequences", "probability", "expected"),
    [
        (1, 0.6, (2, 5)),
        (1, 0.95, (5, 8)),
        (1, 0.02, (0, 0)),
        (1, 0.0, (0, 0)),
        (1, 1.0, (8, 8)),
        (8, 0.6, (0, 1)),
        (8, 0.98, (1, 8)),
        (32, 0.6, (0, 0)),
        (32, 0.98, (0, 0)),
        (64, 0.6, (0, 0)),
        (256, 0.6, (0, 0)),
    ],
)
def test_lengths_by_batch_and_probability(
    num_sequences: int, probability: float, expected: tuple[int, int]
) -> None:
    lengths = DraftLength(COSTS, 8).lengths([powers(probability, 8)] * num_sequences)
    assert len(lengths) == num_sequences
    assert len(set(lengths)) == 1
    assert expected[0] <= lengths[0] <= expected[1]


def test_the_sure_ones_of_a_wide_batch_draft_and_the_others_do_not() -> None:
    chances = [powers(0.99, 8)] * 2 + [powers(0.5, 8)] * 10
    lengths = DraftLength(COSTS, 8).lengths(chances)
    assert min(lengths[:2]) >= 2
    assert set(lengths[2:]) == {0}


@given(
    st.lists(
        st.lists(st.floats(0, 1), max_size=3).map(lambda c: sorted(c, reverse=True)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([0.0, 0.0014]),
    st.lists(st.floats(0.0001, 0.02), min_size=5, max_size=5),
)
def test_no_other_choice_is_expected_to_be_faster(
    chances: list[list[float]], draft_s: float, more_s: list[float]
) -> None:
    step_s = [0.018]
    for add_s in more_s:
        step_s.append(step_s[-1] + add_s)
    costs = StepCosts((1, 2, 3, 5, 8, 12), tuple(step_s), draft_s)
    lengths = DraftLength(costs, 3).lengths(chances)
    all_chances = [chance for falling in chances for chance in falling]
    choices = [list(one) for one in product(*(range(len(falling) + 1) for falling in chances))]
    if len(set(all_chances)) < len(all_chances):
        # Equal chances are taken together or not at all.
        choices = [
            [sum(chance >= least for chance in falling) for falling in chances]
            for least in (*all_chances, 2.0)
        ]
    best = max(rate(costs, chances, choice) for choice in choices)
    assert rate(costs, chances, lengths) >= best * (1 - 1e-9)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 80), st.integers(0, 8))
def test_lengths_rise_with_the_probability_and_never_exceed_k(
    one: float, other: float, num_sequences: int, most: int
) -> None:
    low, high = sorted((one, other))
    length = DraftLength(MTP_COSTS, most)
    less, more = (length.lengths([powers(p, 12)] * num_sequences) for p in (low, high))
    assert 0 <= less[0] <= more[0] <= most


def test_no_more_drafts_than_there_are_chances() -> None:
    assert DraftLength(COSTS, 8).lengths([[], [0.9], [0.9, 0.8]]) == [0, 1, 2]
    assert DraftLength(COSTS, 8).lengths([]) == []


def test_a_wider_batch_never_drafts_more() -> None:
    length = DraftLength(COSTS, 8)
    by_width = [length.lengths([powers(0.8, 8)] * width)[0] for width in (1, 8, 16, 32, 64)]
    assert by_width == sorted(by_width, reverse=True)
    assert by_width[0] > by_width[-1] == 0


def test_drafts_that_cost_time_of_their_own_are_fewer_until_they_are_there() -> None:
    length = DraftLength(StepCosts(COSTS.rows, COSTS.step_s, draft_s=0.006), 8)
    chances = [powers(0.5, 8)]
    free = DraftLength(COSTS, 8).lengths(chances)
    assert length.lengths(chances) < free
    assert length.lengths(chances, is_drafted=True) == free


def test_costs_between_and_beyond_the_measured_rows() -> None:
    length = DraftLength(StepCosts((2, 4, 8), (1.0, 3.0, 2.0)), 8)
    costs = [length.cost_s(rows) for rows in (1, 2, 3, 4, 8, 12)]
    assert costs == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]  # a dip is noise
    rising = DraftLength(StepCosts((1, 2, 4), (1.0, 2.0, 6.0)), 8)
    assert [rising.cost_s(rows) for rows in (6, 3, 1)] == [10.0, 4.0, 1.0]
    flat = DraftLength(StepCosts((1,), (0.0,)), 2)
    assert flat.lengths([[0.5, 0.25]]) == [2]


def test_the_average_follows_hits_and_the_first_miss() -> None:
    assert moving_average(0.5, 3, 3, 0.5) == 0.9375
    assert moving_average(0.5, 3, 0, 0.5) == 0.25
    assert moving_average(0.5, 3, 1, 0.5) == 0.375  # the draft behind the miss says nothing
    assert moving_average(0.5, 1, 1, 0.5) == 0.75


def test_acceptance_counts_the_steps_without_drafts() -> None:
    start = Acceptance(0.5)
    idle = start.after(0, 0).after(0, 0)
    assert (idle.probability, idle.num_idle_steps) == (0.5, 2)
    assert idle.after(2, 1).num_idle_steps == 0
    assert start.after(2, 0).probability < 0.5 < start.after(2, 2).probability


@pytest.mark.parametrize(
    ("costs", "width"), [(c, w) for c in (COSTS, MTP_COSTS) for w in (1, 8, 64)]
)
def test_probes_cost_at_most_their_share(costs: StepCosts, width: int) -> None:
    length = DraftLength(costs, 8)
    probe_s = length.cost_s(width + 1) + costs.draft_s - length.cost_s(width)
    steps_s = length.probe_period(width) * length.cost_s(width)
    assert width * probe_s <= PROBE_SHARE * steps_s * (1 + 1e-9)
    assert all(a <= b for a, b in pairwise(length.probe_period(w) for w in (1, 8, 64)))


def _mixture_costs(rows: tuple[int, ...]) -> StepCosts:
    """A step reads all of a decoder but its experts, and those of 128 that its rows chose, 8 each.

    As with Qwen3-30B-A3B's shape: one row's experts are 0.66 of what it reads. The whole costs 1 s.
    """
    return StepCosts(rows, tuple(0.34 + 0.66 * 16 * (1 - (1 - 8 / 128) ** count) for count in rows))


@pytest.mark.parametrize(
    ("num_sequences", "probability", "expected"),
    [(1, 0.5, 0), (1, 0.99, 8), (4, 0.7, 0), (64, 0.95, 8)],
)
def test_few_rows_of_a_mixture_draft_less_and_many_more(
    num_sequences: int, probability: float, expected: int
) -> None:
    """A second row reads other experts than the first; a 65th reads hardly any that no other did.

    The dense model of these tests drafts at 0.5 and 0.7, and nothing in a wide batch.
    """
    costs = _mixture_costs((1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 16, 32, 64, 128, 256, 512, 576))
    lengths = DraftLength(costs, 8).lengths([powers(probability, 8)] * num_sequences)
    assert lengths == [expected] * num_sequences


def test_a_curve_of_a_mixture_is_that_of_its_steps_between_measured_rows() -> None:
    """It is concave, and lines between few measured numbers of rows stay near it."""
    found = DraftLength(_mixture_costs((1, 2, 3, 4, 6, 8, 16, 32, 64)), 8)
    for rows in range(1, 65):
        [wanted_s] = _mixture_costs((rows,)).step_s
        assert found.cost_s(rows) == pytest.approx(wanted_s, rel=0.06)
