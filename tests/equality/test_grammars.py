"""Under grammars the demo model answers alike with every method, preempted, handed off, in chunks.

The pool holds about half of what is asked for, so sequences are preempted. A part of
`--every-combination`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import jsonschema
import pytest
from tokenizers import Tokenizer

from common.grammar import Grammar, GrammarKind
from common.ids import AttemptId
from common.request import GenerationRequest, SamplingParams
from engine.runner.model_runner import ModelRunner
from grammars.texts import as_lark
from pdserve.checkpoints.demo_model import demo_model_folder
from router.tools.definitions import Tool, ToolUse
from router.tools.formats import HERMES
from router.tools.grammars import GrammarWriter
from router.tools.thinking import ThinkingFormat
from tests.equality.combinations import answers_alone, pressed_node
from tests.support.engine.choices import METHODS, MODES
from tests.support.models.pressure import (
    Node,
    answer_together,
    answer_with_handoff,
    demo_runners,
)

"""The first test computes all answers alone."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Anna", "Ben"]},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
        "city": {"enum": ["Paris", "Rome"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    Grammar(GrammarKind.REGEX, "([a-z]{2,5} ){9,12}the end"),
    Grammar(GrammarKind.LARK, 'start: ("red" | "green" | "blue") (", " ("red" | "green")){8,9}'),
    None,
)
_WRITER = GrammarWriter({})
_TOOL = Tool(name="person", description=None, parameters=PERSON, is_strict=True)
_TOOLS = ToolUse(tools=(_TOOL,), callable_names=frozenset({"person"}))
AGENTS = (
    (
        '<tool_call>\n{"name": "person"}\n</tool_call>\n' * 3 + '<tool_call>\n{"name":',
        _WRITER.calls(HERMES, _TOOLS, ThinkingFormat.NONE),
        '<tool_call>\n{"name": "person", "arguments": ',
    ),
    (
        "Sure.</think>" * 6 + "Sure",
        _WRITER.behind_thinking(as_lark(GRAMMARS[0], "asked"), ThinkingFormat.BEGUN),
        '</think>\n\n{"name": "',
    ),
)
"""Prompts that the model goes on repeating, so that its drafts reach over the end of free text; the
grammars of an answer that may call a tool and of one behind thinking, as the router writes them;
and what the answer holds."""
WAYS_TO_DRAW = [
    SamplingParams(max_tokens=32, temperature=0.9, frequency_penalty=0.1),
    SamplingParams(max_tokens=32, temperature=0.9),
    SamplingParams(max_tokens=32, temperature=0.0),
]
"""Without a penalty rows are drawn without a mask and then checked, unless drafts follow them."""


@pytest.fixture(scope="module")
def runners(requests: list[GenerationRequest]) -> tuple[ModelRunner, ModelRunner]:
    """They have compiled the grammars of all requests, as a node has when it hears of one."""
    for runner in demo_runners():
        for request in requests:
            grammar = request.sampling.grammar
            compiled = None if grammar is None else runner.prepare_grammar(grammar)
            if compiled is not None:
                compiled.result(60)
    return demo_runners()


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))
    return [
        GenerationRequest(
            id=AttemptId(f"r{i}", 1),
            prompt_token_ids=tuple(tokenizer.encode(f"{i} two three four, as JSON: " * 3).ids),
            sampling=replace(WAYS_TO_DRAW[i % 3], seed=i, grammar=grammar),
            deadline_s=60.0,
        )
        for i, grammar in enumerate(GRAMMARS * 2)
    ] + [
        GenerationRequest(
            id=AttemptId(f"agent{i}", 1),
            prompt_token_ids=tuple(tokenizer.encode(prompt).ids),
            sampling=SamplingParams(
                max_tokens=48, temperature=0.0, grammar=Grammar(GrammarKind.LARK, text)
            ),
            deadline_s=60.0,
        )
        for i, (prompt, text, _) in enumerate(AGENTS)
    ]


@pytest.fixture(scope="module")
def undisturbed(
    runners: tuple[ModelRunner, ModelRunner], requests: list[GenerationRequest]
) -> list[list[int]]:
    return answers_alone(runners[0], requests)


def test_whole_answers_follow_their_grammar(
    runners: tuple[ModelRunner, ModelRunner], undisturbed: list[list[int]]
) -> None:
    assert undisturbed[0][-1] in runners[0].eos_token_ids
    tokenizer = Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))
    jsonschema.validate(json.loads(tokenizer.decode(undisturbed[0])), PERSON)
    for tokens, (_, _, held) in zip(undisturbed[-len(AGENTS) :], AGENTS, strict=True):
        assert held in tokenizer.decode(tokens)


def check_pressure(node: Node, method: str, mode: str) -> None:
    """Check that the run preempted in its mode, and drafted."""
    counters = node.scheduler.statistics().counters
    assert counters.num_preemptions > 0, "the pool was large enough: nothing was shown"
    assert (counters.num_swapped_out > 0) == (mode == "swap")
    assert (counters.num_drafted > 0) == (method != "none")


@pytest.mark.covers("G01", "G02")
@pytest.mark.parametrize("way", [*product(METHODS, MODES, ("sync", "async"))], ids="-".join)
def test_one_node_that_preempts(
    way: tuple[str, str, str],
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    method, mode, steps = way
    combination = ("none", "last_in_first_out", mode, method, steps)
    node = pressed_node(runners[0], combination, num_blocks=9, budget=20)
    assert answer_together(node, requests) == undisturbed
    check_pressure(node, method, mode)


@pytest.mark.parametrize("handoff", [*product(METHODS, MODES)], ids="-".join)
def test_a_handoff(
    handoff: tuple[str, str],
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    method, mode = handoff
    combination = ("none", "last_in_first_out", mode, method, "sync")
    prefill = pressed_node(runners[0], combination, num_blocks=12)
    decode = pressed_node(runners[1], combination, num_blocks=9)
    assert answer_with_handoff(prefill, decode, requests) == undisturbed
    check_pressure(decode, method, mode)
