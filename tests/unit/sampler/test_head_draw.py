"""A head answers only where rounding on the device cannot decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.request import SamplingParams
from engine.core.runner_contract import SampleInput
from engine.runner.drawing.head_draw import Head, draw_from_head

VOCAB_SIZE = 1000
LOGITS = np.array([5.0, 4.0, 3.0, 2.0, 0.0], np.float32)
WEIGHTS = np.exp(LOGITS - LOGITS[0])
NONE = np.zeros(0, np.int64)


def head(total: float = float(WEIGHTS.sum())) -> Head:
    return Head(np.arange(10, 15), LOGITS, False, total, NONE, LOGITS[:0])


def asked(**params: float) -> SampleInput:
    return SampleInput(SamplingParams(max_tokens=9, seed=1, **params), 0, [], [])  # type: ignore[arg-type]


def is_answered(given: Head, one: SampleInput) -> bool:
    return draw_from_head(given, one, [], VOCAB_SIZE) is not None


def test_a_nucleus_that_ends_between_two_tokens_within_rounding_is_left() -> None:
    border = float(WEIGHTS[:2].sum() / WEIGHTS.sum())
    assert is_answered(head(), asked(top_p=border + 1e-3))
    assert is_answered(head(), asked(top_p=border - 1e-3))
    assert not is_answered(head(), asked(top_p=border + 1e-7))
    assert not is_answered(head(), asked(top_p=border - 1e-7))


def test_a_nucleus_larger_than_the_head_is_left() -> None:
    assert is_answered(head(), asked(top_p=0.9))
    assert not is_answered(head(total=2 * float(WEIGHTS.sum())), asked(top_p=0.9))


def test_filters_that_reach_the_heads_last_token_are_left() -> None:
    assert is_answered(head(), asked(top_k=4))
    assert not is_answered(head(), asked(top_k=5))
    assert not is_answered(head(), asked(top_k=6))
    assert is_answered(head(), asked(min_p=0.02))
    assert not is_answered(head(), asked(min_p=1e-4))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_of_equals_is_left(temperature: float) -> None:
    one = asked(temperature=temperature)
    ids = np.array([3, 7, 20])
    equal = np.full(3, 2.0, np.float32)
    assert not is_answered(Head(ids, equal, False, 9.0, ids, equal), one)
    falling = np.array([3.0, 2.0, 1.0], np.float32)
    assert is_answered(Head(ids, falling, False, 9.0, ids, falling), one)


def test_the_largest_noise_is_only_known_if_the_last_candidate_is_clearly_lower() -> None:
    one = asked()
    ids = np.array([3, 7, 20])
    falling = np.array([3.0, 2.0, 1.0], np.float32)
    whole = Head(ids, falling, False, 9.0, ids, falling)
    alone = replace(whole, noisy_ids=ids[:1], noisy_logits=falling[:1])
    assert is_answered(whole, one)
    assert not is_answered(alone, one)
