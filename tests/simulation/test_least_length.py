"""`min_tokens` holds wherever a token is drawn: prefill, decode, drafts, a continued answer."""

from __future__ import annotations

from typing import Any

import pytest

from common.request import MAX_STOP_TOKEN_IDS
from tests.simulation.scripted_node import NodeSize
from tests.simulation.world import World, assert_finished
from tests.support.engine.build import make_request
from tests.support.engine.choices import FREE_METHODS
from tests.support.engine.hash_runner import EOS_TOKEN_ID, expected_tokens

LEAST = 25
STOPS = tuple(range(0, 16 * MAX_STOP_TOKEN_IDS, 16))
ASKED: dict[str, Any] = {"max_tokens": 60, "stop_token_ids": STOPS}


def check_length(answer: list[int], least: int) -> None:
    """Check that the answer ended at its first stop token behind `least` tokens."""
    ends = {*STOPS, EOS_TOKEN_ID}
    assert least < len(answer) < ASKED["max_tokens"]
    assert not ends & set(answer[:-1])
    assert answer[-1] in ends


@pytest.mark.covers("F139")
@pytest.mark.parametrize("method", FREE_METHODS)
@pytest.mark.parametrize("seed", [1, 3, 5, 8])
def test_a_handoff_withholds_ends_on_both_nodes(method: str, seed: int) -> None:
    size = NodeSize(method=method, num_drafts=0 if method == "none" else 3)
    world = World(prefill=size, decode=size)
    free = world.ask(9, seed=seed, temperature=1.0, **ASKED)
    assert_finished(world, free)
    late = world.ask(9, seed=seed, temperature=1.0, min_tokens=LEAST, **ASKED)
    assert_finished(world, late)
    check_length(late.answer(), LEAST)
    num_same = len(free.answer()) - 1
    assert num_same < LEAST, "nothing had to be withheld"
    assert late.answer()[:num_same] == free.answer()[:num_same]


def test_the_first_token_is_no_end() -> None:
    """The prefill node draws it."""
    prompts = [tuple(range(first, first + 9)) for first in range(400)]
    ending = [
        prompt
        for prompt in prompts
        if len(expected_tokens(prompt, make_request(prompt, **ASKED).sampling)) == 1
    ]
    assert ending
    world = World()
    for prompt in ending[:5]:
        asked = world.ask(prompt, min_tokens=1, **ASKED)
        assert_finished(world, asked)
        assert len(asked.answer()) > 1


@pytest.mark.parametrize("method", FREE_METHODS)
@pytest.mark.parametrize("num_known", [1, 7, LEAST - 1, LEAST])
def test_a_continued_answer_counts_what_another_node_gave(method: str, num_known: int) -> None:
    num_drafts = 0 if method == "none" else 3
    world = World(decode=NodeSize(method=method, num_drafts=num_drafts))
    whole = make_request(9, seed=3, min_tokens=LEAST, **ASKED)
    answer = expected_tokens(whole.prompt_token_ids, whole.sampling)
    check_length(answer, LEAST)
    known = tuple(answer[:num_known])
    rest = world.ask(9, seed=3, min_tokens=LEAST, output_token_ids=known, **ASKED)
    world.settle()
    assert [rest.tokens[i] for i in sorted(rest.tokens)] == answer[num_known:]
