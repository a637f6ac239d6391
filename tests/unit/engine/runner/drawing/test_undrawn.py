"""A sequence without a token says why: its rules about tokens, its grammar, or a bug."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import InternalError, InvalidRequest, PdserveError
from common.request import SamplingParams
from common.token_rules import TokenRules
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.drawing.draws import Draws, accept_drafts, add_draws
from engine.runner.drawing.sampler import Sampler, sampled_rows
from engine.runner.drawing.undrawn import why_undrawn

VOCAB, EOS = 97, frozenset({3})
PROMPT = [1, 2]


def one(
    rules: TokenRules, output: list[int], drafts: tuple[int, ...] = (), least: int = 0
) -> ScheduledSequence:
    params = SamplingParams(max_tokens=99, temperature=0.0, rules=rules, min_tokens=least)
    sample = SampleInput(params, len(output), PROMPT, output)
    tokens = [(PROMPT + output)[-1], *drafts]
    return ScheduledSequence(0, tokens, len(PROMPT + output) - 1, [0], sample, len(drafts))


def errors_of(
    entries: list[ScheduledSequence], logits: np.ndarray, failures: dict[int, PdserveError]
) -> dict[int, PdserveError]:
    batch = batch_of(entries)
    rows = sampled_rows(batch, VOCAB, EOS)
    draws = Draws()
    add_draws(draws, Sampler(VOCAB), logits, rows)
    _, bad = accept_drafts(batch, draws)
    return why_undrawn(bad, batch, draws, rows, failures)


def logits_of(num_rows: int) -> np.ndarray:
    logits = np.zeros((num_rows, VOCAB), np.float32)
    logits[:, 5] = 1
    return logits


def test_a_request_that_leaves_no_token_is_at_fault() -> None:
    free = one(TokenRules(), [])
    stuck = one(TokenRules(allowed_token_ids=(5,), bad_words=((5, 5),)), [5])
    ends = one(TokenRules(allowed_token_ids=(3,)), [], least=1)
    errors = errors_of([free, stuck, ends, free], logits_of(4), {})
    assert list(errors) == [1, 2]
    for error, count in zip(errors.values(), (1, 0), strict=True):
        assert isinstance(error, InvalidRequest)
        assert str(error).startswith(f"no token is left to draw behind {count} tokens: ")


def test_it_is_found_behind_drafts_too() -> None:
    rules = TokenRules(allowed_token_ids=(5, 6), bad_words=((5, 5, 5), (5, 5, 6)))
    errors = errors_of([one(rules, [6], drafts=(5, 5))], logits_of(3), {})
    assert str(errors[0]).startswith("no token is left to draw behind 3 tokens: ")


@pytest.mark.parametrize("allowed", [(), (5, 6)])
def test_logits_that_are_not_finite_are_a_bug(allowed: tuple[int, ...]) -> None:
    logits = logits_of(1)
    logits[0, 5] = np.nan
    entries = [one(TokenRules(allowed_token_ids=allowed), []), one(TokenRules(), [])]
    errors = errors_of(entries, np.concatenate((logits, logits_of(1))), {})
    assert list(errors) == [0]
    assert isinstance(errors[0], InternalError)
    assert str(errors[0]) == "logits are not finite, or no token can be drawn"


def test_a_grammar_says_itself_why_it_failed() -> None:
    logits = logits_of(2)
    logits[:] = np.nan
    entries = [one(TokenRules(), []), one(TokenRules(), [])]
    failure = InternalError("too large")
    seat = int(batch_of(entries).rows[1])
    errors = errors_of(entries, logits, {seat: failure})
    assert errors[1] is failure
    assert "not finite" in str(errors[0])
