"""Biases, bad words and allowed tokens in the draw: alone, together, and behind drafts."""

from __future__ import annotations

import numpy as np
import pytest

from common.grammar import Grammar, GrammarKind
from common.request import SamplingParams
from common.token_rules import ThinkingBudget, TokenRules
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
    allowed = masks.add_to(of_grammar, [(2, 3), (40,)])
    assert allowed is not None
    of_rows = [allowed.masks[row].tolist() for row in allowed.mask_rows]
    assert of_rows == [[0b0100, 0], [0, 1 << 8]]
    assert masks.add_to(of_grammar, [(), ()]) is of_grammar
    assert of_grammar.masks.tolist() == [[0b0110, 0]]


END = 90


def budget(num_tokens: int, *begin: int) -> ThinkingBudget:
    return ThinkingBudget(num_tokens=num_tokens, end_token_id=END, begin_token_ids=begin)


@pytest.mark.covers("T44")
@pytest.mark.parametrize(
    ("thinking", "output", "token_id"),
    [
        (budget(2), [1], 5),
        (budget(2), [1, 2], END),
        (budget(2), [1, END], 5),
        (budget(2), [1, 2, END], 5),
        (budget(0), [], END),
        (budget(1, 8), [8, 1], END),
        (budget(1, 8), [1, 1], 5),
        (budget(1, 8), [1, 8, 1], END),
    ],
)
def test_the_last_tag_is_drawn_where_the_budget_of_thinking_is_spent(
    thinking: ThinkingBudget, output: list[int], token_id: int
) -> None:
    assert drawn(TokenRules(thinking=thinking), output) == (token_id,)


@pytest.mark.covers("T44")
@pytest.mark.parametrize(
    ("output", "drafts", "tokens"),
    [
        ([1], (5, 5, 5), (5, END)),
        ([1], (5, END, 5), (5, END, 5, 5)),
        ([1, 5], (END, 5), (END, 5, 5)),
        ([END], (5, 5, 5), (5, 5, 5, 5)),
    ],
)
def test_a_budget_is_spent_at_the_same_token_behind_drafts(
    output: list[int], drafts: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    assert drawn(TokenRules(thinking=budget(2)), output, drafts) == tokens


def test_nothing_keeps_the_last_tag_from_being_drawn() -> None:
    """Other rules hold before it and behind it."""
    rules = TokenRules(
        biases=((END, -100.0),),
        bad_words=((END,), (5,)),
        allowed_token_ids=(6, 7),
        thinking=budget(1),
    )
    early = SamplingParams(
        max_tokens=99, temperature=0.0, rules=rules, min_tokens=9, stop_token_ids=(END,)
    )
    tokens: list[int] = []
    for _ in range(3):
        one = drawn_from(logits_with(), SampleInput(early, len(tokens), [1, 2], tokens), ())
        assert one is not None
        tokens += one.token_ids
    assert tokens == [6, END, 6]


@pytest.mark.covers("T44")
@pytest.mark.parametrize(("taken", "token_ids"), [((6, 7, END), [END]), ((6, 7), [6, 7])])
def test_a_grammar_that_does_not_take_the_last_tag_puts_it_off(
    taken: tuple[int, ...], token_ids: list[int]
) -> None:
    sampling = SamplingParams(
        max_tokens=99,
        temperature=0.0,
        rules=TokenRules(thinking=budget(2)),
        grammar=Grammar(GrammarKind.REGEX, "a+"),
    )
    entry = ScheduledSequence(0, [2], 3, [0], SampleInput(sampling, 2, [9], [1, 2]))
    masks = AllowedMasks(VOCAB)
    of_grammar = masks.add_to(None, [taken])
    rows = sampled_rows(batch_of([entry]), VOCAB, frozenset(), of_grammar, masks)
    assert rows.allowed is not None
    found = [one for one in range(VOCAB) if rows.allowed.allows(np.array([one])).all()]
    assert found == token_ids


def test_a_budget_is_a_rule_at_its_place_alone() -> None:
    """Rows of other places, and of other requests, are drawn as if there were none."""
    of_rows = [
        (output, rules)
        for output in ([], [1], [1, 2], [1, 2, 3])
        for rules in (TokenRules(thinking=budget(2)), TokenRules())
    ]
    entries = [
        ScheduledSequence(
            row,
            [9, *output][-1:],
            len(output),
            [row],
            SampleInput(params(rules), len(output), [9], output),
        )
        for row, (output, rules) in enumerate(of_rows)
    ]
    batch = batch_of(entries)
    rows = sampled_rows(batch, VOCAB, frozenset())
    is_spent = [len(output) == 2 and rules.thinking is not None for output, rules in of_rows]
    assert batch.seats.have_rules_at(rows.histories, rows.output_indices).tolist() == is_spent
    assert rows.allowed is not None
    assert (rows.allowed.mask_rows >= 0).tolist() == is_spent
