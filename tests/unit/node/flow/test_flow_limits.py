"""Which requests a node refuses because it could never answer them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.grammar import Grammar, GrammarKind
from common.request import GenerationRequest
from engine.core.planner_contract import StepLimits
from node.flow.flow_limits import FlowLimits
from tests.support.engine.build import make_request

LIMITS = FlowLimits(vocab_size=100, max_model_len=40, max_queued_requests=1)
STEP = StepLimits(
    max_num_seqs=1, max_num_batched_tokens=8, block_size=4, max_model_len=40,
    num_speculative_tokens=3,
)  # fmt: skip


def request(num_prompt: int, num_output: int = 0, *, token: int = 1) -> GenerationRequest:
    """A request whose last known token is `token`."""
    tokens = (1,) * (num_prompt + num_output - 1) + (token,)
    return make_request(
        tokens[:num_prompt], output_token_ids=tokens[num_prompt:], max_tokens=num_output + 1
    )


def problem(given: GenerationRequest, num_blocks: int = 10) -> str:
    found = LIMITS.problem_with(given, STEP, num_blocks)
    return "" if found is None else str(found)


@pytest.mark.parametrize("num_output", [0, 1, 30])
def test_one_token_must_follow_within_the_models_length(num_output: int) -> None:
    assert problem(request(39 - num_output, num_output)) == ""
    assert "at most 39, so that one can follow" in problem(request(40 - num_output, num_output))


@pytest.mark.parametrize("num_output", [0, 5])
def test_known_tokens_and_those_of_the_first_step_must_fit_the_blocks(num_output: int) -> None:
    assert problem(request(16 - num_output, num_output), num_blocks=5) == ""
    assert "needs 6 KV blocks" in problem(request(17 - num_output, num_output), num_blocks=5)


def test_no_slots_are_needed_beyond_the_models_length() -> None:
    assert problem(request(39), num_blocks=10) == ""
    assert "needs 10 KV blocks" in problem(request(39), num_blocks=9)


@pytest.mark.parametrize("num_output", [0, 2])
def test_every_token_must_be_in_the_vocabulary(num_output: int) -> None:
    assert problem(request(5, num_output, token=99)) == ""
    assert "token id 100 is not in the vocabulary of 100" in problem(
        request(5, num_output, token=100)
    )


def test_a_grammar_is_refused_where_it_would_be_ignored() -> None:
    asked = make_request((1,) * 5, grammar=Grammar(GrammarKind.REGEX, "a"))
    assert "does not follow grammars" in problem(asked)
    follows = replace(LIMITS, vocab_size=1000, has_grammars=True)
    assert follows.problem_with(asked, STEP, 10) is None
