"""Log probabilities of a prompt's own tokens, from logits that are written here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.prompt_logprobs import PromptLogprobs
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.drawing.draws import MAX_SAMPLED_ROWS
from engine.runner.drawing.prompt_scores import find_prompt_logprobs
from engine.runner.drawing.sampler import token_logprobs
from engine.runner.flat_batch import BatchLimits, flatten

VOCAB = 50
LIMITS = BatchLimits(max_tokens=500, max_len=500, num_blocks=40, block_size=16, vocab_size=VOCAB)


class WrittenLogits:
    """A `Decoder` whose row r has the logits of row r of an array, in one buffer for all calls."""

    num_layers = 0

    def __init__(self, logits: np.ndarray) -> None:
        self._logits = logits
        self._buffer = np.zeros((MAX_SAMPLED_ROWS, logits.shape[1]), np.float32)

    def begin(self, batch: Any) -> Any: ...
    def run_layer(self, index: int, hidden: Any) -> None: ...
    def logits(self, hidden: Any, rows: np.ndarray) -> np.ndarray:
        self._buffer[: len(rows)] = self._logits[rows]  # fails for more rows than are planned for
        return self._buffer[: len(rows)]


def prompt_batch(lengths: list[int], num_tops: list[int | None]) -> StepBatch:
    """Whole prompts; every one draws its first token."""
    rng = np.random.default_rng(0)
    entries = []
    for length, num_top in zip(lengths, num_tops, strict=True):
        prompt = rng.integers(0, VOCAB, length).tolist()
        params = SamplingParams(max_tokens=1, prompt_logprobs=num_top)
        sample = SampleInput(params, 0, prompt, [])
        entries.append(ScheduledSequence(0, prompt, 0, range(40), sample))
    return batch_of(entries)


def find(batch: StepBatch, logits: np.ndarray) -> tuple[dict[int, PromptLogprobs], list[int]]:
    flat = flatten(batch, LIMITS)
    return find_prompt_logprobs(WrittenLogits(logits), None, flat, batch, logits.shape[1])


def random_logits(num_rows: int, vocab_size: int = VOCAB) -> np.ndarray:
    """Few different values, so that there are ties."""
    rng = np.random.default_rng(7)
    return rng.integers(-20, 20, (num_rows, vocab_size)).astype(np.float32) / 4


@pytest.mark.parametrize("lengths", [[2], [9, 5], [MAX_SAMPLED_ROWS + 2, 3, 200]])
@pytest.mark.parametrize("num_top", [0, 4])
def test_each_token_is_judged_by_the_row_before_it(lengths: list[int], num_top: int) -> None:
    batch = prompt_batch(lengths, [num_top] * len(lengths))
    logits = random_logits(sum(lengths))
    scores, bad = find(batch, logits)
    assert bad == []
    first = 0
    for entry, length in enumerate(lengths):
        found, prompt = scores[entry], batch[entry].token_ids
        assert len(found) == length - 1
        assert found.is_well_formed
        for place in range(length - 1):
            row, token_id = logits[first + place], prompt[place + 1]
            right = token_logprobs(row, token_id, num_top)
            assert found.logprobs[place] == np.float32(right.logprob)
            ranking = np.argsort(-row, kind="stable").tolist()
            assert found.ranks[place] == ranking.index(token_id) + 1
            assert found.top(place, num_top) == tuple(
                (one, float(np.float32(logprob))) for one, logprob in right.top
            )
        first += length


def test_prompts_that_ask_for_nothing_and_of_one_token_have_none() -> None:
    batch = prompt_batch([4, 1, 3], [None, 2, 1])
    scores, bad = find(batch, random_logits(8))
    assert bad == []
    assert list(scores) == [2]


@pytest.mark.covers("T38")
def test_more_likeliest_tokens_than_the_vocabulary_has() -> None:
    batch = prompt_batch([3], [20])
    batch.seats.token_ids %= 5
    scores, bad = find(batch, random_logits(3, vocab_size=5))
    assert bad == []
    found = scores[0]
    assert found.num_top == 5
    assert sorted(token_id for token_id, _ in found.top(1, 20)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("row", [0, 3])
def test_logits_that_are_not_finite_fail_their_prompt_alone(wrong: float, row: int) -> None:
    batch = prompt_batch([5, 4], [1, 1])
    logits = random_logits(9)
    logits[row, 11] = wrong
    scores, bad = find(batch, logits)
    assert bad == [0]
    assert list(scores) == [1]


def test_the_row_that_draws_is_not_looked_at() -> None:
    batch = prompt_batch([3], [0])
    logits = random_logits(3)
    logits[2] = np.nan
    scores, bad = find(batch, logits)
    assert bad == []
    assert isinstance(scores[0], PromptLogprobs)
