"""Answers under grammars over handoffs, and answers that another node continues."""

from __future__ import annotations

import pytest

from common.grammar import Grammar
from tests.fakes.tool_grammars import GRAMMARS
from tests.simulation.world import NodeSize, World, right_answer
from tests.unit.engine_core.build import make_request


@pytest.mark.parametrize("method", ["none", "ngram", "mtp", "grammar"])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("threshold", [None, 0])
def test_handoffs_and_continued_answers_follow_the_grammar(
    method: str, grammar: Grammar, threshold: int | None
) -> None:
    """Token 0 is drawn on a prefill node; a killed or drained node's answer goes on on another."""
    # G03, G05.
    size = NodeSize(budget=7, method=method, num_drafts=2)
    whole = make_request(9, max_tokens=40, temperature=1.0, seed=3, grammar=grammar)
    right = right_answer(whole)
    for num_known in {0, 1, len(right) // 2, len(right) - 1}:
        world = World(threshold=threshold, decode=size, prefill=size)
        rest = world.ask(
            whole.prompt_token_ids, max_tokens=40, temperature=1.0, seed=3, grammar=grammar,
            output_token_ids=tuple(right[:num_known]),
        )  # fmt: skip
        world.settle()
        assert rest.error is None, rest.error
        assert [rest.tokens[i] for i in range(num_known, len(right))] == right[num_known:]
