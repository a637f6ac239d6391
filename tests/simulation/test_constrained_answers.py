"""Answers under grammars over handoffs, and answers that another node continues.

The state of a grammar is in no message: whoever continues an answer finds it from the tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.grammar import Grammar
from tests.simulation.drained_cluster import Cluster
from tests.simulation.scripted_node import NodeSize
from tests.simulation.world import World, right_answer
from tests.support.engine.build import make_request
from tests.support.engine.choices import METHODS
from tests.support.engine.tool_grammars import GRAMMARS
from tests.support.examples import everyday


@pytest.mark.covers("G03", "G05")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("threshold", [None, 0])
def test_handoffs_and_continued_answers_follow_the_grammar(
    method: str, grammar: Grammar, threshold: int | None
) -> None:
    """Token 0 is drawn on a prefill node; what another node has answered is not drawn again."""
    size = NodeSize(budget=7, method=method, num_drafts=2)
    whole = make_request(9, max_tokens=40, temperature=1.0, seed=3, grammar=grammar)
    right = right_answer(whole)
    points = (len(right) // 2, 0, 1, len(right) - 1)
    for num_known in points[: everyday(1, of=4)]:
        world = World(threshold=threshold, decode=size, prefill=size)
        rest = world.ask(
            tuple(whole.prompt_token_ids), max_tokens=40, temperature=1.0, seed=3, grammar=grammar,
            output_token_ids=tuple(right[:num_known]),
        )  # fmt: skip
        world.settle()
        assert rest.error is None, rest.error
        assert [rest.tokens[i] for i in range(num_known, len(right))] == right[num_known:]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("threshold", [None, 0])
def test_a_killed_node_changes_no_constrained_answer(method: str, threshold: int | None) -> None:
    """All that it said and nobody has read is lost with it; another node continues."""
    num_continued = 0
    for num_steps in range(2, 40, everyday(19, of=1)):
        world = Cluster(threshold=threshold, size=NodeSize(budget=12, method=method, num_drafts=2))
        clients: list[Any] = [
            world.ask(5 + i, name=f"c{i}", seed=i, max_tokens=24, temperature=1.0, grammar=grammar)
            for i, grammar in enumerate(GRAMMARS)
        ]
        for _ in range(num_steps):
            world.step()
        world.crash(world.d)
        world.end(*clients)
        num_continued += sum(known > 0 for client in clients for _, known in client.asked)
    assert num_continued > 0
