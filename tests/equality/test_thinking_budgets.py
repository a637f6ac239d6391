"""Budgets of thinking end it at the same token with every method, preempted, handed off, in chunks.

Any token of the demo model is a tag here: of a prompt that begins the thinking, of an output that
does, and of one under a grammar behind it. The pool holds about half of what is asked for, so
sequences are preempted.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.grammar import Grammar, GrammarKind
from common.ids import AttemptId
from common.request import GenerationRequest, SamplingParams
from common.token_rules import ThinkingBudget, TokenRules
from engine.runner.model_runner import ModelRunner
from grammars.texts import as_lark
from pdserve.checkpoints.demo_model import demo_model_folder
from router.tools.grammars import GrammarWriter
from router.tools.harmony.grammar import answers
from router.tools.harmony.message_cut import Place
from router.tools.thinking import ThinkingFormat, ThinkingTags
from tests.equality.combinations import answers_alone, covering_choices, pressed_node
from tests.support.engine.choices import METHODS, MODES
from tests.support.models.pressure import answer_together, answer_with_handoff, demo_runners

END_ID = 5
"""A token of the tokenizer that no text of it has."""
NUM_OUTPUT = 36
BUDGETS = (0, 1, 7, 16, 30)
WITHIN_CHARACTER = (1, 2, 3)
FIRST_OF_FOUR = 187
"""The token of a byte with which characters of four bytes begin, of which three are tokens too."""
PROMPTS = (
    "one two three four one two three four one two three four one two three",
    "The river was cold and the boat was old. The river was cold and the",
)
_BEHIND = GrammarWriter({"[/THINK]": END_ID}, ThinkingTags("[THINK]", "[/THINK]")).behind_thinking(
    as_lark(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["yes", "no"]})), "asked"),
    ThinkingFormat.BEGUN,
)
"""Free text up to the last tag, and then one of two words."""
_TAG_IDS = {
    "<|end|>": END_ID,
    "<|start|>": 6,
    "<|channel|>": 7,
    "<|message|>": 8,
    "<|constrain|>": 9,
}
ANALYSIS_ID = 14975
"""The token of the word."""
_HEADER = (7, ANALYSIS_ID, 8)


def in_harmony() -> SamplingParams:
    """Thinking in a message of its own, which the model would not end, under a grammar."""
    asked = as_lark(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["yes", "no"]})), "asked")
    text = answers(Place.HEADER, None, asked, spelt=lambda _: _HEADER)
    for tag, token_id in _TAG_IDS.items():
        text = text.replace(tag, f"<[{token_id}]>")
    budget = ThinkingBudget(num_tokens=9, end_token_id=END_ID, begin_token_ids=_HEADER)
    return SamplingParams(
        max_tokens=NUM_OUTPUT,
        temperature=0.0,
        grammar=Grammar(GrammarKind.LARK, text),
        rules=TokenRules(biases=((ANALYSIS_ID, 100.0),), thinking=budget),
    )


def ways() -> list[tuple[int, SamplingParams]]:
    """Budgets of thinking that the prompt begins: greedy, drawn with penalties, under a grammar."""
    found = []
    for number, num_tokens in enumerate(BUDGETS):
        rules = TokenRules(thinking=ThinkingBudget(num_tokens=num_tokens, end_token_id=END_ID))
        more: dict[str, Any] = {"temperature": 0.0}
        if number % 2:
            more = {"temperature": 0.8, "frequency_penalty": 0.1}
        found += [
            (num_tokens, SamplingParams(
                max_tokens=NUM_OUTPUT, seed=number, ignore_eos=True, rules=rules, **more,
            )),
            (num_tokens, SamplingParams(
                max_tokens=NUM_OUTPUT, seed=number, temperature=0.0, rules=rules,
                grammar=Grammar(GrammarKind.LARK, _BEHIND),
            )),
        ]  # fmt: skip
    return found


def within_a_character() -> list[SamplingParams]:
    """Budgets that are spent where the grammar does not take the last tag yet."""
    return [
        SamplingParams(
            max_tokens=NUM_OUTPUT, temperature=0.0, grammar=Grammar(GrammarKind.LARK, _BEHIND),
            rules=TokenRules(
                biases=((FIRST_OF_FOUR, 100.0),),
                thinking=ThinkingBudget(num_tokens=num_tokens, end_token_id=END_ID),
            ),
        )
        for num_tokens in WITHIN_CHARACTER
    ]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    columns = {"way": (METHODS, MODES, ("sync", "async")), "handoff": (METHODS, MODES)}
    for name in columns.keys() & set(metafunc.fixturenames):
        rows = [*product(*columns[name])]
        is_all = metafunc.config.getoption("--every-combination")
        metafunc.parametrize(name, rows if is_all else covering_choices(rows), ids="-".join)


@pytest.fixture(scope="module")
def runners() -> tuple[ModelRunner, ModelRunner]:
    for runner in demo_runners():
        for grammar in (Grammar(GrammarKind.LARK, _BEHIND), in_harmony().grammar):
            compiled = None if grammar is None else runner.prepare_grammar(grammar)
            if compiled is not None:
                compiled.result(60)
    return demo_runners()


@pytest.fixture(scope="module")
def requests(runners: tuple[ModelRunner, ModelRunner]) -> list[GenerationRequest]:
    """The last one has a thinking that its output begins, with whatever token that begins with."""
    greedy = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
    of_ways = [sampling for _, sampling in ways()]
    made = [
        request(number, sampling)
        for number, sampling in enumerate([*of_ways, *within_a_character(), in_harmony()])
    ]
    plain = request(len(made), greedy)
    [[first, second, *_]] = answers_alone(runners[0], [plain])
    budget = ThinkingBudget(num_tokens=9, end_token_id=END_ID, begin_token_ids=(first, second))
    return [*made, replace(plain, sampling=replace(greedy, rules=TokenRules(thinking=budget)))]


def request(number: int, sampling: SamplingParams) -> GenerationRequest:
    tokenizer = Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))
    return GenerationRequest(
        id=AttemptId(f"r{number}", 1),
        prompt_token_ids=tuple(tokenizer.encode(PROMPTS[number % 2]).ids),
        sampling=sampling,
        deadline_s=60.0,
    )


@pytest.fixture(scope="module")
def undisturbed(
    runners: tuple[ModelRunner, ModelRunner], requests: list[GenerationRequest]
) -> list[list[int]]:
    return answers_alone(runners[0], requests)


@pytest.mark.covers("T44")
def test_thinking_ends_with_its_budget_and_the_answer_follows(
    undisturbed: list[list[int]],
) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))
    assert undisturbed[-1].index(END_ID) == 2 + 9
    for (num_tokens, sampling), tokens in zip(ways(), undisturbed, strict=False):
        assert tokens.index(END_ID) == num_tokens
        assert tokens.count(END_ID) == 1
        if sampling.grammar is not None:
            assert tokenizer.decode(tokens[num_tokens + 1 :]).strip() in ('"yes"', '"no"')


@pytest.mark.covers("T44")
def test_under_a_grammar_thinking_ends_behind_a_whole_character(
    undisturbed: list[list[int]],
) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))
    found = undisturbed[len(ways()) : -2]
    assert len(found) == len(WITHIN_CHARACTER)
    for tokens in found:
        assert tokens[0] == FIRST_OF_FOUR
        assert tokens.index(END_ID) == 4
        assert tokenizer.decode(tokens[5:]).strip() in ('"yes"', '"no"')


@pytest.mark.covers("T44")
def test_a_message_that_is_thought_ends_with_its_budget(undisturbed: list[list[int]]) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))
    tokens = undisturbed[-2]
    assert tuple(tokens[:3]) == _HEADER
    assert tokens.index(END_ID) == 3 + 9
    said = tokenizer.decode(tokens[3 + 9 + 1 :])
    assert re.fullmatch(r'assistantfinal( ?[A-Za-z]+)?"(yes|no)"', said), "it may have a type"


@pytest.mark.covers("T44")
def test_budgets_on_a_node_that_preempts(
    way: tuple[str, str, str],
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    method, mode, steps = way
    combination = ("none", "last_in_first_out", mode, method, steps)
    node = pressed_node(runners[0], combination, num_blocks=9, budget=20)
    assert answer_together(node, requests) == undisturbed
    counters = node.scheduler.statistics().counters
    assert counters.num_preemptions > 0
    assert (counters.num_drafted > 0) == (method != "none")


@pytest.mark.covers("T44")
def test_budgets_over_a_handoff(
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
    assert decode.scheduler.statistics().counters.num_preemptions > 0
