"""Grammars of answers in harmony accept what requests allow, and nothing else."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from router.tools.definitions import Tool, ToolUse
from router.tools.harmony.grammar import answers
from router.tools.harmony.message_cut import Place
from router.tools.harmony.tags import HARMONY, MARKS
from tests.unit.router.tools.grammar_judge import Judge

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ADD = Tool(name="add", description="Add", parameters={**NUMBER, "additionalProperties": False})
ADD_ALL = Tool(name="add_all", description=None, parameters=None)
THOUGHT = "<|channel|>analysis<|message|>Hm, <b>:\n🌍<|end|><|start|>assistant"
REMARK = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
TEXT = "<|channel|>final<|message|>"
CALL = HARMONY.call_text("add", '{"n": 5}').removesuffix(HARMONY.end)
NEXT = "<|end|><|start|>assistant"
YES = 'asked: "yes"'
HEADER = Place.HEADER


def use(**options: Any) -> ToolUse:
    names = frozenset({"add", "add_all"})
    return ToolUse(**{"tools": (ADD, ADD_ALL), "callable_names": names} | options)


@cache
def judge() -> Judge:
    return Judge(tuple(tag for tag in MARKS if tag != "<|end|>"), ends="<|call|>")


def spelt(text: str) -> list[int]:
    return list(judge().tokenizer.encode(text).ids)


def check(grammar: str, *, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    for text in right:
        assert judge().accepts(grammar, text), text
    for text in wrong:
        assert not judge().accepts(grammar, text), text


CALLS = (
    CALL,
    ' to=functions.add<|channel|>commentary json<|message|>{"n": 5}',
    '<|channel|>analysis to=functions.add code<|message|>{"n": 5}',
    '<|channel|>commentary to=functions.add<|constrain|>json<|message|>{"n": 5}',
    '<|channel|>commentary to=functions.add<|message|>{"n": 5}',
    "<|channel|>commentary to=functions.add_all <|constrain|>json<|message|>{}",
    f"{CALL}{NEXT}{CALL}",
)
NO_CALLS = (
    "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}",
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"n": "5"}',
    "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}",
    '<|channel|>commentary to=add<|message|>{"n": 5}',
    '<|channel|>final to=functions.add<|message|>{"n": 5}',
    f"{CALL}{NEXT}{TEXT}x",
    f"{CALL} x",
)


def test_an_answer_with_tools() -> None:
    grammar = answers(HEADER, use())
    texts = (f"{TEXT}Hello", TEXT, f"{REMARK}{CALL}", f"{REMARK}{THOUGHT}{CALL}")
    right = (*CALLS, *texts, *(f"{THOUGHT}{one}" for one in (*CALLS, *texts)))
    spelled = f"{TEXT}<|end"
    assert judge().accepts(grammar, spelled, "|> of a text")
    wrong = (*NO_CALLS, "", "Hello", THOUGHT, "<|channel|>analysis<|message|>x", f"{TEXT}x{NEXT}")
    check(grammar, right=right, wrong=(*wrong, "<|channel|>other<|message|>x"))


def test_an_answer_that_must_call() -> None:
    grammar = answers(HEADER, use(must_call=True))
    right = (*CALLS, *(f"{THOUGHT}{THOUGHT}{one}" for one in CALLS))
    check(grammar, right=right, wrong=(*NO_CALLS, f"{TEXT}x", f"{REMARK}{CALL}", THOUGHT))


def test_a_single_call() -> None:
    grammar = answers(HEADER, use(callable_names=frozenset({"add"}), is_parallel=False))
    check(grammar, right=(CALL,), wrong=(f"{CALL}{NEXT}{CALL}", CALLS[5]))


@pytest.mark.covers("G27")
def test_a_constraint_is_on_the_text_alone() -> None:
    alone = answers(HEADER, None, YES)
    typed = "<|channel|>final <|constrain|>JSON<|message|>"
    right = (f"{TEXT}yes", f"{THOUGHT}{TEXT}yes", f"{THOUGHT}{THOUGHT}{TEXT}yes", f"{typed}yes")
    wrong = ("yes", f"{TEXT}no", f"{REMARK}{TEXT}yes", f"{TEXT}yes{NEXT}", THOUGHT)
    check(alone, right=right, wrong=(*wrong, CALL))
    check(answers(HEADER, use(), YES), right=(*right, CALL, f"{THOUGHT}{CALL}"), wrong=wrong)


def test_with_a_budget_the_model_thinks_once() -> None:
    empty = "<|channel|>analysis<|message|><|end|><|start|>assistant"
    texts = (f"{TEXT}x", f"{THOUGHT}{TEXT}x", f"{empty}{TEXT}", f"{THOUGHT}{REMARK}{TEXT}x")
    wrong = (f"{THOUGHT}{THOUGHT}{TEXT}x", f"{REMARK}{THOUGHT}{TEXT}x", THOUGHT)
    check(answers(HEADER, None, spelt=spelt), right=texts, wrong=(*wrong, CALL))
    of_tools = answers(HEADER, use(), spelt=spelt)
    check(of_tools, right=(*texts, f"{THOUGHT}{CALL}"), wrong=(*wrong, f"{THOUGHT}{THOUGHT}{CALL}"))
    on_analysis = '<|channel|>analysis to=functions.add code<|message|>{"n": 5}'
    check(of_tools, right=(on_analysis, f"{THOUGHT}{on_analysis}"), wrong=(on_analysis + NEXT,))
    role = "<|start|>assistant"
    between = answers(Place.BETWEEN, None, spelt=spelt)
    check(between, right=(*(f"{role}{one}" for one in texts),), wrong=(f"{role}{wrong[0]}",))
    behind = answers(Place.THOUGHT, None, spelt=spelt)
    check(behind, right=(f"x{NEXT}{TEXT}x",), wrong=(f"x{NEXT}{THOUGHT}{TEXT}x",))


@pytest.mark.parametrize(
    ("place", "must_call", "rule", "right", "wrong"),
    [
        (Place.BETWEEN, False, "", f"<|start|>assistant{TEXT}x", f"{TEXT}x"),
        (Place.THOUGHT, False, "", f"x{NEXT}{THOUGHT}{TEXT}y", "x"),
        (Place.THOUGHT, False, YES, f"x{NEXT}{TEXT}yes", f"x{NEXT}{TEXT}no"),
        (Place.TEXT, False, "", "x", f"x{NEXT}{TEXT}y"),
        (Place.TEXT, False, "", f"x{NEXT}{CALL}", f"x{CALL}"),
        (Place.TEXT, False, YES, "yes", "no"),
        (Place.TEXT, True, "", f"{NEXT}{CALL}", f"x{NEXT}{CALL}"),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ends(
    place: Place, must_call: bool, rule: str, right: str, wrong: str
) -> None:
    check(answers(place, use(must_call=must_call), rule), right=(right,), wrong=(wrong,))
