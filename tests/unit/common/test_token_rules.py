"""Rules about single tokens: what is refused, and what a request that names a token can name."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from common.request import MAX_SALT_CHARS, SamplingParams
from common.token_rules import NO_RULES, TokenRules
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
