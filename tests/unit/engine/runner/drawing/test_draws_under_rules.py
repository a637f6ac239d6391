"""Biases, bad words and allowed tokens in the draw: alone, together, and behind drafts."""

from __future__ import annotations

import numpy as np
import pytest

from common.request import SamplingParams
from common.token_rules import TokenRules
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.drawing.sampler import Sampler, sampled_rows
from engine.runner.drawing.token_rules import AllowedMasks
from engine.runner.grammars.allowed_tokens import AllowedTokens
from tests.unit.engine.runner.drawing.drawn import drawn_from

VOCAB = 97


def params(rules: TokenRules, **more: float) -> SamplingParams:
    given: dict[str, float] = {"temperature": 0.0, **more}
    return SamplingParams(max_tokens=99, rules=rules, **given)  # type: ignore[arg-type]


def logits_with(**best: float) -> np.ndarray:
    """One row: token 5 is the likeliest, then 6, then 7, all others are 0."""
    row = np.zeros((1, VOCAB), np.float32)
    row[0, 5], row[0, 6], row[0, 7] = 3, 2, 1
    return row


def drawn(rules: TokenRules, output: list[int], drafts: tuple[int, ...] = ()) -> tuple[int, ...]:
    one = SampleInput(params(rules), len(output), [1, 2], output)
    result = drawn_from(np.repeat(logits_with(), len(drafts) + 1, axis=0), one, drafts)
    assert result is not None
    return result.token_ids


@pytest.mark.parametrize(
    ("rules", "token_id"),
    [
        (TokenRules(), 5),
        (TokenRules(biases=((6, 1.5),)), 6),
        (TokenRules(biases=((5, -100.0), (6, -2.0))), 7),
        (TokenRules(biases=((6, 0.75), (6, 0.75))), 6),
        (TokenRules(bad_words=((5,),)), 6),
        (TokenRules(allowed_token_ids=(7, 6)), 6),
        (TokenRules(allowed_token_ids=(96,)), 96),
        (TokenRules(allowed_token_ids=(7, 6), biases=((7, 5.0), (5, 100.0))), 7),
        (TokenRules(allowed_token_ids=(7, 6), bad_words=((6,),)), 7),
    ],
)
def test_the_likeliest_token_that_the_rules_leave(rules: TokenRules, token_id: int) -> None:
    assert drawn(rules, []) == (token_id,)


def test_a_bad_word_is_not_completed_and_may_be_begun() -> None:
    rules = TokenRules(bad_words=((8, 9, 5),))
    assert drawn(rules, [8, 9]) == (6,)
    assert drawn(rules, [3, 8, 9]) == (6,)
    assert drawn(rules, [9, 8]) == (5,)
    assert drawn(rules, [9]) == (5,)
    assert drawn(rules, []) == (5,)


@pytest.mark.covers("F139")
def test_a_bad_word_is_found_across_drafts_and_not_in_the_prompt() -> None:
    assert drawn(TokenRules(bad_words=((5, 5),)), [4], drafts=(5, 5)) == (5, 6)
    assert drawn(TokenRules(bad_words=((1, 2, 5),)), []) == (5,)


def test_each_row_of_a_batch_has_its_own_rules() -> None:
    """Also as a part of the rows, and where rows without rules stand between."""
    rules = [(5,), (), (5, 6), (), (6,), (5,)]
    entries = [
        ScheduledSequence(row, [1], 0, [row], SampleInput(one, 0, [1], []))
        for row, one in enumerate(
            params(TokenRules(bad_words=tuple((word,) for word in words))) for words in rules
        )
    ]
    rows = sampled_rows(batch_of(entries), VOCAB, frozenset())
    logits = np.repeat(logits_with(), len(rules), axis=0)
    assert Sampler(VOCAB).draw(logits, rows)[0].tolist() == [6, 5, 7, 5, 5, 6]
    part = np.array([4, 2, 1])
    assert Sampler(VOCAB).draw(logits[part], rows.take(part))[0].tolist() == [5, 7, 5]


def test_log_probabilities_are_those_without_biases_and_of_allowed_tokens() -> None:
    asked = SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)
    biased = SamplingParams(
        max_tokens=9, temperature=0.0, logprobs=1, rules=TokenRules(biases=((6, 5.0),))
    )
    plain = drawn_from(logits_with(), SampleInput(asked, 0, [1], []), ())
    other = drawn_from(logits_with(), SampleInput(biased, 0, [1], []), ())
    assert plain is not None
    assert other is not None
    assert other.token_ids == (6,)
    assert other.logprobs[0].top == plain.logprobs[0].top
    assert other.logprobs[0].logprob == pytest.approx(plain.logprobs[0].logprob - 1)


def test_rules_of_one_sequence_are_not_anothers() -> None:
    """The draw of a row is the same, whatever the rules of the rows beside it."""
    rng = np.random.RandomState(1)
    rows = rng.standard_normal((4, VOCAB)).astype(np.float32)
    rules = TokenRules(biases=((3, 4.0),), bad_words=((5,),), allowed_token_ids=tuple(range(50)))
    for draft in range(3):
        ruled = SampleInput(params(rules, temperature=1.0, seed=5), 2, [1], [7, 8])
        free = SampleInput(params(TokenRules(), temperature=1.0, seed=5), 2, [1], [7, 8])
        alone = drawn_from(rows[draft : draft + 1], ruled, ())
        assert alone is not None
        assert alone.token_ids[0] < 50
        assert alone.token_ids[0] != 5
        assert drawn_from(rows[draft : draft + 1], free, ()) is not None


def test_a_set_is_allowed_only_as_far_as_the_grammar_goes() -> None:
    masks = AllowedMasks(64)
    of_grammar = AllowedTokens(np.array([0, -1]), np.array([[0b0110, 0]], np.int32))
    rules = [TokenRules(allowed_token_ids=(2, 3)), TokenRules(allowed_token_ids=(40,))]
    allowed = masks.add_to(of_grammar, rules)
    assert allowed is not None
    of_rows = [allowed.masks[row].tolist() for row in allowed.mask_rows]
    assert of_rows == [[0b0100, 0], [0, 1 << 8]]
    assert masks.add_to(of_grammar, [TokenRules(), TokenRules()]) is of_grammar
    assert of_grammar.masks.tolist() == [[0b0110, 0]]
