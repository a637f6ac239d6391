"""The sampler as a whole: penalties, log probabilities, independence of rows, bad rows."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InternalError
from common.request import SamplingParams, TokenLogprobs
from engine.core.runner_contract import SampleInput
from engine.runner.drawing.sampler import Sampler
from tests.support.models.draws import draw_all, expected_token, rows_of, sample_one

VOCAB = 8


def one_input(
    prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), index: int = 0, **params: Any
) -> SampleInput:
    sampling = SamplingParams(max_tokens=100, **params)
    return SampleInput(sampling, index, prompt, output)


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    assert sample_one([1, 5, 2, 5], one_input(temperature=0)) == (1, None)
    assert sample_one([-0.0, 0.0], one_input(temperature=0)) == (0, None)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert sample_one([1, 5, 2, 5], one_input(temperature=1e-300)) == (1, None)


@pytest.mark.covers("K05")
@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-320}, {"min_p": 1.0, "top_k": 1}])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_one_token_that_is_kept_is_the_likeliest(
    params: dict[str, Any], temperature: float
) -> None:
    for seed in range(20):
        one = one_input(temperature=temperature, seed=seed, **params)
        assert sample_one([1, 5, 2, 5], one) == (1, None)
        assert sample_one([1, 4.999, 2, 5], one) == (3, None)


@pytest.mark.parametrize(
    ("logits", "prompt", "output", "params", "wanted"),
    [
        # repetition: 4 / 2 = 2 < 3, also for a prompt token, also when seen twice
        ([3, 4, 1], (1,), (), {"repetition_penalty": 2.0}, 0),
        ([3, 4, 1], (), (1,), {"repetition_penalty": 2.0}, 0),
        ([1.9, 4, 1], (1, 1), (1,), {"repetition_penalty": 2.0}, 1),
        # negative logits are multiplied: -1 * 2 < -1.5
        ([-1, -1.5, -9], (0,), (), {"repetition_penalty": 2.0}, 1),
        # below 1 rewards: 2 / 0.5 = 4 > 3
        ([3, 2, 1], (1,), (), {"repetition_penalty": 0.5}, 1),
        # presence counts once, and only output tokens
        ([4, 3, 1], (0,), (), {"presence_penalty": 2.0}, 0),
        ([4, 3, 1], (), (0,), {"presence_penalty": 2.0}, 1),
        ([4, 1.9, 1], (), (0, 0, 0), {"presence_penalty": 2.0}, 0),
        # frequency counts each time: 4 - 0.5 * 2 = 3 < 3.1
        ([4, 3.1, 1], (0, 0), (0, 0), {"frequency_penalty": 0.5}, 1),
        ([4, 3.1, 1], (0, 0), (0,), {"frequency_penalty": 0.5}, 0),
        # together, repetition first: 8 / 2 - 1 - 0.5 * 2 = 2
        ([8, 1.9, 0], (), (0, 0),
         {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}, 0),
        ([8, 2.1, 0], (), (0, 0),
         {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}, 1),
        # negative penalties reward
        ([3, 2, 1], (), (1,), {"presence_penalty": -1.5}, 1),
    ],
)  # fmt: skip
def test_penalties_by_hand(
    logits: list[float],
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    params: dict[str, Any],
    wanted: int,
) -> None:
    one = one_input(prompt, output, temperature=0, **params)
    assert sample_one(logits, one)[0] == wanted


def test_penalties_change_draws_as_well_as_the_largest() -> None:
    for index in range(50):
        one = one_input((), (0,), index, temperature=1.0, presence_penalty=2.0, top_k=1)
        assert sample_one([4, 3, 1], one)[0] == 1


def test_logprobs_are_of_the_models_own_logits() -> None:
    logits = [math.log(p) + 3 for p in (0.5, 0.25, 0.125, 0.125)]
    one = one_input((), (0,), temperature=0.2, top_k=1, logprobs=3, presence_penalty=2.0)
    token_id, logprobs = sample_one(logits, one)
    assert token_id == 1
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert [v for v, _ in logprobs.top] == [0, 1, 2]
    assert [p for _, p in logprobs.top] == pytest.approx(
        [math.log(0.5), math.log(0.25), math.log(0.125)], abs=1e-6
    )


def test_logprobs_zero_reports_the_drawn_token_alone() -> None:
    token_id, logprobs = sample_one([0.0, 0.0], one_input(temperature=0, logprobs=0))
    assert (token_id, logprobs) == (0, TokenLogprobs(-math.log(2)))
    assert sample_one([0.0, 0.0], one_input(temperature=0))[1] is None


@pytest.mark.covers("T38")
def test_more_logprobs_than_tokens_reports_every_token() -> None:
    _, logprobs = sample_one([0.0, 1.0], one_input(temperature=0, logprobs=20))
    assert logprobs is not None
    assert [v for v, _ in logprobs.top] == [1, 0]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "seed": st.integers(0, 2**64 - 1),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(max_examples=60, deadline=None)
@given(params=st.lists(PARAMS, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_depends_on_nothing_but_itself(params: list[dict[str, Any]], seed: int) -> None:
    vocab_size = 501  # odd, so that rows lie at every alignment
    logits = np.random.default_rng(seed).normal(size=(len(params), vocab_size)).astype(np.float32)
    inputs = [
        one_input((1, 2, 3), (4, 4), index, **one_params) for index, one_params in enumerate(params)
    ]
    sampler = Sampler(vocab_size)
    together = draw_all(sampler, logits, inputs)
    alone = [draw_all(sampler, logits[i : i + 1], [one])[0] for i, one in enumerate(inputs)]
    backwards = draw_all(sampler, logits[::-1].copy(), inputs[::-1])
    assert together == alone == backwards[::-1]


@pytest.mark.covers("T38")
@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    vocab_size=st.sampled_from([1, 5, 64, 300, 5000]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 12.0]),
    seed=st.integers(0, 1000),
    min_tokens=st.sampled_from([0, 3]),
)
def test_every_token_is_the_one_that_sorting_all_tokens_gives(
    params: list[dict[str, Any]], vocab_size: int, spread: float, seed: int, min_tokens: int
) -> None:
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(size=(len(params), vocab_size)) * spread, 3).astype(np.float32)
    eos = frozenset({0, vocab_size - 1}) if vocab_size > 2 else frozenset[int]()
    inputs = [
        one_input(
            tuple(random.integers(0, vocab_size, 5).tolist()),
            tuple(random.integers(0, vocab_size, 4).tolist()),
            index,
            min_tokens=min_tokens,
            **one_params,
        )
        for index, one_params in enumerate(params)
    ]
    before = logits.copy()
    found = draw_all(Sampler(vocab_size), logits, inputs, eos)
    np.testing.assert_array_equal(logits, before)
    assert found == [expected_token(row, one, eos) for row, one in zip(logits, inputs, strict=True)]


@pytest.mark.parametrize("num_seen", [1, 2, 4, 5, 40])
@pytest.mark.parametrize("likeliest", [0, 63, 64, 959, 960, 999])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_block_whose_largest_token_is_penalised_has_another_one(
    num_seen: int, likeliest: int, temperature: float
) -> None:
    """The last 40 of 1,000 tokens are no whole block; few penalised ones are looked at alone."""
    random = np.random.default_rng(num_seen)
    logits = random.normal(size=1000).astype(np.float32)
    logits[likeliest] = 4.5
    seen = tuple(np.argsort(-logits)[:num_seen].tolist())
    eos = frozenset({(likeliest + 1) % 1000})
    for index in range(6):
        for params in (
            {"repetition_penalty": 10.0},
            {"presence_penalty": 2.0},
            {"frequency_penalty": -2.0, "min_tokens": 4},
        ):
            one = one_input(
                seen[:1], seen, index, temperature=temperature, top_p=0.9, seed=index, **params
            )
            (found,) = draw_all(Sampler(1000), logits[None], [one], eos)
            assert found == expected_token(logits, one, eos)


@pytest.mark.parametrize("token_id", [5, 64, 999])
@pytest.mark.parametrize("others", [(), tuple(range(100, 140))])
def test_nothing_is_drawn_from_a_row_that_a_penalty_makes_infinite(
    token_id: int, others: tuple[int, ...]
) -> None:
    logits = np.zeros(1000, np.float32)
    logits[token_id] = -3e38
    one = one_input((token_id, *others), temperature=1.0, repetition_penalty=10.0)
    assert draw_all(Sampler(1000), logits[None], [one]) == [None]
    assert draw_all(Sampler(1000), logits[None], [one_input(others, temperature=0)]) == [0]


def test_a_draw_depends_on_seed_and_index() -> None:
    def draws(seed: int, indices: range) -> list[int | None]:
        return [sample_one([0.0] * 50, one_input(index=i, seed=seed))[0] for i in indices]

    assert draws(1, range(20)) == draws(1, range(20))
    assert draws(1, range(20)) != draws(2, range(20))
    assert draws(1, range(20)) != draws(1 << 32, range(20))
    assert draws(1, range(20))[5:] == draws(1, range(5, 20))


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 5.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 100.0, "min_p": 0.9},
    {"temperature": 1.0, "top_k": VOCAB - 1, "top_p": 0.99, "repetition_penalty": 0.5},
]


def drawn_with_ends(
    index: int, seed: int, min_tokens: int, params: dict[str, Any], ends: float
) -> int | None:
    """Draw with logits of `ends` at the stop token 1 and the end-of-sequence tokens 4 and 6."""
    logits = np.array([1.0, ends, 0.5, 0.0, ends, -1.0, ends, 0.2], np.float32)
    stops = {"stop_token_ids": (1, VOCAB)}
    one = one_input((), (1, 4), index, seed=seed, min_tokens=min_tokens, **stops, **params)
    return sample_one(logits, one, frozenset({4, 6, -1}))[0]


@pytest.mark.parametrize("params", WAYS)
def test_nothing_that_ends_an_output_is_drawn_before_its_least_length(
    params: dict[str, Any],
) -> None:
    for seed in range(20):
        assert drawn_with_ends(2, seed, 3, params, ends=60.0) not in {1, 4, 6}
        assert drawn_with_ends(3, seed, 3, params, ends=60.0) in {1, 4, 6}


@pytest.mark.parametrize("params", WAYS)
def test_a_least_length_changes_no_other_draw(params: dict[str, Any]) -> None:
    """Where an end would not be drawn, it makes no difference that it cannot be."""
    for seed in range(20):
        free = drawn_with_ends(3, seed, 0, params, ends=-1e4)
        assert drawn_with_ends(3, seed, 3, params, ends=-1e4) == free
        assert drawn_with_ends(3, seed, 4, params, ends=-1e4) == free


def test_logprobs_are_the_models_own_where_ends_are_withheld() -> None:
    one = one_input(temperature=0, logprobs=1, min_tokens=1)
    token_id, logprobs = sample_one([0.0, 1.0], one, frozenset({1}))
    assert token_id == 0
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(-math.log(1 + math.e))
    assert [v for v, _ in logprobs.top] == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_that_may_be_drawn_is_refused(temperature: float) -> None:
    one = one_input(temperature=temperature, min_tokens=1, stop_token_ids=(0,))
    assert sample_one([0.0, 0.0], one, frozenset({1}))[0] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drawn_from_a_bad_row(value: float, temperature: float) -> None:
    logits = [0.0, 0.0, 50.0, 0.0, 0.0, value, 0.0, 0.0]
    assert sample_one(logits, one_input(temperature=temperature))[0] is None


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros((2, VOCAB), np.float32),
        np.zeros((1, VOCAB + 1), np.float32),
        np.zeros((1, VOCAB), np.float64),
        np.zeros((1, 2 * VOCAB), np.float32)[:, ::2],
    ],
)
def test_logits_of_another_shape_or_type_are_refused(logits: np.ndarray) -> None:
    with pytest.raises(InternalError, match="logits are"):
        Sampler(VOCAB).draw(logits, rows_of([one_input()], VOCAB))


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    one = one_input((token_id,), repetition_penalty=1.5)
    with pytest.raises(InternalError, match="wanted 0 to 7"):
        Sampler(VOCAB).draw(np.zeros((1, VOCAB), np.float32), rows_of([one], VOCAB))


def test_extreme_logits_and_temperatures_stay_silent_and_true() -> None:
    logits = [3e38, -3e38, 3e38, 0.0]
    drawn = {
        sample_one(logits, one_input(index=i, temperature=1e-5, top_p=0.99, min_p=0.1))[0]
        for i in range(40)
    }
    assert drawn == {0, 2}
