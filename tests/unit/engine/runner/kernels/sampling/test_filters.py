"""Filters and the draw against plain numpy, and the draw's frequencies against probabilities."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.runner.kernels.sampling.draw import draw
from engine.runner.kernels.sampling.filters import kept_prefix, likeliest
from engine.runner.kernels.sampling.row_scan import BLOCK
from tests.support.models.draws import kept, noise_of, reference_kept

# Upper 0.1 % points of the chi-square distribution.
CHI_SQUARE_0_999 = {3: 16.27, 7: 24.32, 9: 27.88}

# Few distinct depths make ties, wide ones reach the last bucket, infinities weigh nothing.
DEPTHS = st.lists(
    st.one_of(
        st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 63.99, 70.0, 200.0, math.inf]),
        st.floats(0, 80, width=32),
        st.floats(0, 0.125, width=32),
    ),
    min_size=1,
    max_size=80,
).map(lambda values: np.array([*values[:-1], 0.0], np.float32))


@settings(max_examples=500)
@given(
    depths=DEPTHS,
    top_k=st.integers(0, 90),
    top_p=st.one_of(st.just(1.0), st.floats(1e-3, 0.9999)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-30, 1.0)),
)
def test_filters_keep_what_sorting_everything_keeps(
    depths: np.ndarray, top_k: int, top_p: float, min_p: float
) -> None:
    wanted = reference_kept(depths, top_k, top_p, min_p)
    # Where a hair of top_p decides, the order of additions does.
    assume(wanted == reference_kept(depths, top_k, top_p * (1 + 1e-9), min_p))
    assume(wanted == reference_kept(depths, top_k, top_p * (1 - 1e-9), min_p))
    assert kept(depths, top_k, top_p, min_p) == sorted(wanted)


def depths_of(probabilities: list[float]) -> np.ndarray:
    weights = np.array(probabilities)
    return np.asarray(-np.log(weights / weights.max()), np.float32)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "wanted"),
    [
        (0, 1.0, 0.0, [0, 1, 2, 3, 4]),
        (1, 1.0, 0.0, [1]),
        (3, 1.0, 0.0, [0, 1, 3]),  # 0, 3 and 4 tie: the lowest ids
        (99, 1.0, 0.0, [0, 1, 2, 3, 4]),
        (0, 0.01, 0.0, [1]),  # at least one
        (0, 0.39, 0.0, [1]),
        (0, 0.41, 0.0, [0, 1]),
        (0, 0.79, 0.0, [0, 1, 3]),  # 0.8 of 1.0125
        (0, 0.8, 0.0, [0, 1, 3, 4]),
        (0, 0.99, 0.0, [0, 1, 2, 3, 4]),
        (2, 0.6, 0.0, [1]),  # of the two kept, the first holds 0.4 / 0.6
        (2, 0.7, 0.0, [0, 1]),
        (0, 1.0, 0.49, [0, 1, 3, 4]),
        (0, 1.0, 0.51, [1]),
        (0, 1.0, 1.0, [1]),
        (3, 0.99, 0.1, [0, 1, 3]),
    ],
)
def test_filters_by_hand(top_k: int, top_p: float, min_p: float, wanted: list[int]) -> None:
    depths = depths_of([0.2, 0.4, 0.0125, 0.2, 0.2])
    assert kept(depths, top_k, top_p, min_p) == wanted


def drawn(depths: np.ndarray, last_depth: float, last_id: int, seed: int, index: int) -> Any:
    """Draw from a row with these depths, one of which is 0."""
    values = np.float32(0) - depths
    maxima = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    return draw(
        values, maxima, np.float32(0), np.float32(1), last_depth, last_id,
        np.uint64(seed), np.uint32(index), values.ctypes.data,
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    vocab_size=st.integers(1, 1100),
    spread=st.sampled_from([0.0, 0.1, 3.0, 12.0]),
    seed=st.integers(0, 2**64 - 1),
    output_index=st.integers(0, 2**32 - 1),
    top_k=st.integers(0, 300),
)
def test_draw_is_the_largest_noisy_logit_among_the_kept(
    vocab_size: int, spread: float, seed: int, output_index: int, top_k: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=vocab_size) * spread
    depths = (logits.max() - logits).astype(np.float32)
    last_depth, last_id = kept_prefix(depths, depths, 0.0, top_k, 1.0, 0.0)
    scores = noise_of(vocab_size, seed, output_index) - depths
    dropped = np.setdiff1d(np.arange(vocab_size), kept(depths, top_k, 1.0, 0.0))
    scores[dropped] = -np.inf
    token_id = drawn(depths, last_depth, last_id, seed, output_index)
    assert token_id == scores.argmax()


def test_equal_scores_go_to_the_lowest_id() -> None:
    """Two tokens with the same word, which a vocabulary this large has, and no other kept."""
    noise = noise_of(1 << 18, 1, 0)
    order = np.argsort(noise, kind="stable")
    twins = np.flatnonzero(np.diff(noise[order]) == 0)
    assert len(twins) > 0
    for at in twins:
        first, second = sorted(order[at : at + 2])
        depths = np.full(len(noise), np.inf, np.float32)
        depths[[first, second]] = 0
        assert drawn(depths, np.inf, len(depths), 1, 0) == first


def test_noise_of_a_seed_is_fixed_for_ever() -> None:
    """A change here changes the answers of seeded clients."""
    depths = np.zeros(49152, np.float32)
    tokens = [drawn(depths, np.inf, len(depths), 2**40 + 7, i) for i in range(6)]
    assert tokens == [27462, 3031, 22262, 4267, 33613, 32006]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    wanted = probabilities / probabilities.sum() * counts.sum()
    return float((((counts - wanted) ** 2)[wanted > 0] / wanted[wanted > 0]).sum())


@pytest.mark.parametrize("vary", ["output_index", "seed"])
def test_draws_follow_the_probabilities(vary: str) -> None:
    probabilities = np.array([0.3, 0.001, 0.05, 0.149, 0.2, 0.1, 0.15, 0.05])
    depths = depths_of(list(probabilities))
    counts = np.zeros(8)
    for n in range(40_000):
        seed, index = (11, n) if vary == "output_index" else (n, 3)
        counts[drawn(depths, np.inf, 8, seed, index)] += 1
    assert chi_square(counts, probabilities) < CHI_SQUARE_0_999[7]


def test_draws_after_top_k_follow_the_renormalised_probabilities() -> None:
    probabilities = np.array([0.3, 0.001, 0.05, 0.149, 0.2, 0.1, 0.15, 0.05])
    depths = depths_of(list(probabilities))
    last_depth, last_id = kept_prefix(depths, depths, 0.0, 4, 1.0, 0.0)
    counts = np.zeros(8)
    for n in range(40_000):
        counts[drawn(depths, last_depth, last_id, 5, n)] += 1
    probabilities[[1, 2, 5, 7]] = 0
    assert counts[probabilities == 0].sum() == 0
    assert chi_square(counts, probabilities) < CHI_SQUARE_0_999[3]


def test_draws_over_a_wide_vocabulary_are_even() -> None:
    depths = np.zeros(10_000, np.float32)
    counts = np.zeros(10)
    for n in range(5_000):
        counts[drawn(depths, np.inf, 10_000, 1, n) // 1000] += 1
    assert chi_square(counts, np.ones(10)) < CHI_SQUARE_0_999[9]


@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    count=st.integers(0, 20),
)
def test_likeliest_ranks_by_logit_then_id(logits: list[int], count: int) -> None:
    count = min(count, len(logits))
    wanted = sorted(range(len(logits)), key=lambda v: (-logits[v], v))[:count]
    assert likeliest(np.array(logits, np.float32), count).tolist() == wanted


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    """Before the first token with a chance, and with every word that a wide vocabulary has."""
    depths = np.full(1 << 16, np.inf, np.float32)
    depths[-1] = 0
    for seed in range(4):
        token_id = drawn(depths, np.inf, len(depths), seed, 0)
        assert token_id == len(depths) - 1
