"""Tokens that a grammar does not allow are never drawn; logprobs are those among the allowed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.drawing.draws import Draws, add_draws
from engine.runner.drawing.sampler import Sampler, sampled_rows
from engine.runner.grammars.allowed_tokens import AllowedTokens
from engine.runner.kernels.sampling.withhold import WITHHELD, withhold

VOCAB = 77
"""Not a whole number of words."""


def packed(allowed: np.ndarray) -> np.ndarray:
    """Rows of booleans as masks; the bits behind the vocabulary are set."""
    whole = np.ones((len(allowed), 96), bool)
    whole[:, :VOCAB] = allowed
    return np.packbits(whole, axis=1, bitorder="little").view(np.int32)


def test_only_bits_of_0_are_withheld() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, VOCAB)).astype(np.float32)
    allowed = rng.random((3, VOCAB)) < 0.3
    allowed[1] = True
    changed = logits.copy()
    withhold(changed, np.array([2, -1, 0, 1, 2]), packed(allowed))
    for row, mask in enumerate([allowed[2], None, allowed[0], allowed[1], allowed[2]]):
        kept = np.ones(VOCAB, bool) if mask is None else mask
        assert (changed[row][kept] == logits[row][kept]).all()
        assert (changed[row][~kept] == WITHHELD).all()


def test_a_row_without_a_bit_is_not_a_number() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    withhold(logits, np.array([-1, 0]), np.zeros((1, 3), np.int32))
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"temperature": 1e-4},
        {"temperature": 100.0},
        {"temperature": 1.0, "top_k": 60},
        {"temperature": 1.0, "top_p": 0.999},
        {"temperature": 2.0, "min_p": 0.001},
        {"temperature": 1.0, "repetition_penalty": 10.0, "frequency_penalty": 2.0},
        {"temperature": 1.0, "repetition_penalty": 0.01, "presence_penalty": -2.0},
    ],
)
def test_no_way_of_drawing_takes_a_withheld_token(given: dict[str, float]) -> None:
    rng = np.random.default_rng(1)
    sampler = Sampler(VOCAB)
    for seed in range(10):
        params = SamplingParams(max_tokens=9, seed=seed, logprobs=3, **given)  # type: ignore[arg-type]
        sample = SampleInput(params, 2, [1, 2, 3], [4, 5])
        batch = batch_of([ScheduledSequence(0, [5], 4, [0], sample)])
        allowed = rng.random((1, VOCAB)) < 0.1
        allowed[0, seed] = True
        rows = sampled_rows(
            batch, VOCAB, frozenset({0}), AllowedTokens(np.array([0]), packed(allowed))
        )
        logits = (10 * rng.normal(size=(1, VOCAB))).astype(np.float32)
        draws = Draws()
        add_draws(draws, sampler, logits.copy(), rows)
        assert draws.is_drawn == [True]
        assert allowed[0, draws.token_ids[0]]
        among = logits[0][allowed[0]].astype(np.float64)
        log_sum = math.log(np.exp(among - among.max()).sum()) + among.max()
        right = logits[0, draws.token_ids[0]] - log_sum
        assert draws.logprobs[0].logprob == pytest.approx(right, abs=1e-4)
        if allowed.sum() >= 3:
            assert all(allowed[0, one] for one, _ in draws.logprobs[0].top)


def test_a_failing_row_draws_nothing_and_others_do() -> None:
    sample = SampleInput(SamplingParams(max_tokens=9), 0, [1], [])
    entries = [ScheduledSequence(0, [1], 0, [0], sample) for _ in range(2)]
    masks = np.array([[0, 0, 0], [-1, -1, -1]], np.int32)
    rows = sampled_rows(
        batch_of(entries), VOCAB, frozenset({0}), AllowedTokens(np.array([0, 1]), masks)
    )
    draws = Draws()
    logits = np.zeros((2, VOCAB), np.float32)
    logits.flags.writeable = False
    add_draws(draws, Sampler(VOCAB), logits, rows)
    assert draws.is_drawn == [False, True]


def test_a_row_whose_allowed_tokens_are_withheld_for_another_reason_draws_nothing() -> None:
    """Before `min_tokens` no stop token is drawn, and the rule allows nothing else."""
    params = SamplingParams(max_tokens=9, min_tokens=5, stop_token_ids=(7,))
    sample = SampleInput(params, 0, [1], [])
    batch = batch_of([ScheduledSequence(0, [1], 0, [0], sample) for _ in range(3)])
    allowed = np.zeros((2, VOCAB), bool)
    allowed[0, 7] = True
    allowed[1, 40] = True
    rows = sampled_rows(
        batch, VOCAB, frozenset({0}), AllowedTokens(np.array([0, 1, -1]), packed(allowed))
    )
    draws = Draws()
    add_draws(draws, Sampler(VOCAB), np.zeros((3, VOCAB), np.float32), rows)
    assert draws.is_drawn == [False, True, True]
    assert draws.token_ids[1] == 40
