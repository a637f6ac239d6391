"""Rules about single tokens: what is refused, and what a request that names a token can name."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from common.request import MAX_SALT_CHARS, SamplingParams
from common.token_rules import NO_RULES, ThinkingBudget, TokenRules
from tests.support.engine.build import make_request


@pytest.mark.parametrize(
    ("rules", "wrong"),
    [
        ({"biases": ((1, 100.1),)}, "logit_bias of token 1 is 100.1"),
        ({"biases": ((1, float("nan")),)}, "logit_bias of token 1 is nan"),
        ({"biases": tuple((n, 0.0) for n in range(1025))}, "logit_bias has 1025 entries"),
        ({"bad_words": ((),)}, "bad_words has one of 0 tokens"),
        ({"bad_words": ((1,) * 33,)}, "bad_words has one of 33 tokens"),
        ({"bad_words": ((1,),) * 129}, "bad_words has 129 entries"),
        ({"allowed_token_ids": (1,) * 16_385}, "allowed_token_ids has 16385 entries"),
        ({"allowed_token_ids": (1, 2), "bad_words": ((2,), (1,))}, "every token"),
    ],
)
def test_rules_out_of_range_are_named(rules: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidRequest, match=wrong):
        TokenRules(**rules)


def test_the_highest_token_of_any_rule() -> None:
    assert NO_RULES.highest_token_id == -1
    assert TokenRules(biases=((7, 1.0),)).highest_token_id == 7
    assert TokenRules(bad_words=((9, 1), (2, 3))).highest_token_id == 9
    assert TokenRules(allowed_token_ids=(4, 8)).highest_token_id == 8
    assert TokenRules(thinking=ThinkingBudget(num_tokens=9, end_token_id=3)).highest_token_id == 3
    tags = ThinkingBudget(num_tokens=9, end_token_id=3, begin_token_ids=(5,))
    assert TokenRules(thinking=tags).highest_token_id == 5


BEGIN, END = 90, 91


def forced(output: list[int], num_tokens: int, *begin: int) -> list[int]:
    """The indices of the tokens of `output` that a budget forces."""
    budget = ThinkingBudget(num_tokens=num_tokens, end_token_id=END, begin_token_ids=begin)
    found = [
        count for count in range(len(output)) if budget.is_spent(output[:count], has_grammar=False)
    ]
    assert set(found) <= set(budget.indices(has_grammar=False))
    return found


@pytest.mark.parametrize(
    ("output", "num_tokens", "places"),
    [
        ([1, 2, 3, 4, 5], 3, [3]),
        ([1, 2, 3, END, 5, 6, 7, 8], 3, [3]),  # which is the last tag already
        ([1, 2, END, 4, 5, 6, 7, 8], 3, []),
        ([END, 1, 2, 3, 4], 3, []),
        ([1, 2, 3], 0, [0]),
        ([1, 2, 3], 3, []),
        ([BEGIN, 1, 2, 3], 2, [2]),  # a first tag within the thinking is a token like any other
    ],
)
def test_where_a_thinking_that_the_prompt_begins_is_ended(
    output: list[int], num_tokens: int, places: list[int]
) -> None:
    assert forced(output, num_tokens) == places


@pytest.mark.parametrize(
    ("output", "num_tokens", "places"),
    [
        ([BEGIN, 1, 2, 3, 4, 5], 3, [4]),
        ([9, BEGIN, 1, 2, 3, 4, 5], 3, [5]),
        ([9, 9, BEGIN, 1, 2, 3, 4, 5], 3, []),  # it is in the answer
        ([1, 2, 3, 4, 5, 6, 7], 3, []),
        ([BEGIN, 1, 2, END, 3, 4, 5], 3, []),
        ([BEGIN, BEGIN, 1, 2, END, 4, 5, 6], 3, [4]),
        ([BEGIN, 1, 2, 3], 0, [1]),
        ([9, BEGIN, 1, 2, 3], 0, [2]),
        ([BEGIN, END, 1, 2, 3], 0, [1]),
    ],
)
def test_where_a_thinking_that_the_output_begins_is_ended(
    output: list[int], num_tokens: int, places: list[int]
) -> None:
    assert forced(output, num_tokens, BEGIN) == places


@pytest.mark.parametrize(
    ("output", "places"),
    [
        ([BEGIN, 7, 8, 1, 2, 3, 4], [5]),
        ([9, BEGIN, 7, 8, 1, 2, 3, 4], [6]),
        ([9, 9, BEGIN, 7, 8, 1, 2, 3, 4], []),
        ([BEGIN, 6, 8, 1, 2, 3, 4], []),  # another header
        ([BEGIN, 7, 8, 1, END, 2, 3, 4], []),
        ([BEGIN, 7], []),
    ],
)
def test_thinking_may_begin_with_several_tokens(output: list[int], places: list[int]) -> None:
    assert forced(output, 2, BEGIN, 7, 8) == places


@pytest.mark.parametrize("begun", [[], [BEGIN], [9, BEGIN]])
def test_a_grammar_may_put_off_the_last_tag_by_eight_tokens(begun: list[int]) -> None:
    first = (BEGIN,) if begun else ()
    budget = ThinkingBudget(num_tokens=3, end_token_id=END, begin_token_ids=first)
    output = [*begun, *[1] * 20]
    found = [n for n in range(len(output)) if budget.is_spent(output[:n], has_grammar=True)]
    assert found == [*range(len(begun) + 3, len(begun) + 12)]
    assert set(found) <= set(budget.indices(has_grammar=True))
    ended = [*begun, 1, 1, 1, 1, END, *[1] * 9]
    found = [n for n in range(len(ended)) if budget.is_spent(ended[:n], has_grammar=True)]
    assert found == [len(begun) + 3, len(begun) + 4]


@pytest.mark.parametrize("num_tokens", [-1, 2**31])
def test_a_budget_out_of_range_is_refused(num_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match=f"the thinking budget is {num_tokens}: wanted 0 to"):
        ThinkingBudget(num_tokens=num_tokens, end_token_id=1)


@pytest.mark.parametrize(
    "rules", [TokenRules(bad_words=((1, 2),)), TokenRules(allowed_token_ids=(1,))]
)
def test_a_grammar_says_itself_which_tokens_follow(rules: TokenRules) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    with pytest.raises(InvalidRequest, match="cannot be combined with a grammar"):
        SamplingParams(max_tokens=1, grammar=grammar, rules=rules)
    SamplingParams(max_tokens=1, grammar=grammar, rules=TokenRules(biases=((1, 1.0),)))


def test_a_long_salt_is_refused() -> None:
    make_request(3, cache_salt="x" * MAX_SALT_CHARS)
    with pytest.raises(InvalidRequest, match="cache_salt has 257 characters"):
        make_request(3, cache_salt="x" * (MAX_SALT_CHARS + 1))


def test_a_beginning_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="begins with 33 tokens: wanted at most 32"):
        ThinkingBudget(num_tokens=1, end_token_id=1, begin_token_ids=(5,) * 33)
