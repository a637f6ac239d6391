"""Grammars accept the answers that requests allow, and no others; judged by llguidance itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, grammar_from

from router.tools.call_format import CallFormat
from router.tools.definitions import Tool, ToolUse
from router.tools.fenced import FENCED
from router.tools.formats import FORMATS, HERMES, LLAMA_JSON
from router.tools.thinking import ThinkingFormat, ThinkingTags
from tests.unit.router.tools.grammar_judge import Judge

WEATHER = Tool(
    name="get_weather",
    description="The weather of a city",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = Tool(name="now", description=None, parameters=None)
OTHER_TAGS = [ThinkingTags("<seed:think>", "</seed:think>"), ThinkingTags("[THINK]", "[/THINK]")]
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def use(**options: Any) -> ToolUse:
    names = frozenset({"get_weather", "now"})
    return ToolUse(**{"tools": (WEATHER, NOW), "callable_names": names} | options)


@cache
def judge(*tags: str) -> Judge:
    return Judge(tags)


@pytest.fixture(params=[(), TAGS], ids=["tags are text", "tags are tokens"])
def of(request: pytest.FixtureRequest) -> Judge:
    return judge(*request.param)


def weather(form: CallFormat, arguments: str = '{"city": "Paris", "unit": "C"}') -> str:
    return form.call_text("get_weather", arguments)


THOUGHTS = {
    ThinkingFormat.NONE: "",
    ThinkingFormat.BEGUN: "\nhm {}\n</think>\n\n",
    ThinkingFormat.TAGGED: "<think>\nhm {}\n</think>\n\n",
}


@pytest.mark.parametrize("thinking", ThinkingFormat)
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_what_must_be_a_call_is_a_call(of: Judge, form: CallFormat, thinking: Any) -> None:
    grammar = of.writer.calls(form, use(must_call=True), thinking)
    thought = THOUGHTS[thinking]
    assert of.accepts(grammar, thought + weather(form))
    assert of.accepts(grammar, thought + form.call_text("now", "{}"))
    for wrong in ("", "Hello", "Hi " + weather(form), weather(form) + " Hi", weather(form)[:-1]):
        assert not of.accepts(grammar, thought + wrong), wrong
    for wrong in (
        form.call_text("other", "{}"),
        form.call_text("now", '{"a": 1}'),
        weather(form, '{"city": "Paris", "unit": 5}'),
        weather(form, '{"unit": "C"}'),
        weather(form, '{"city": "Paris", "unit": "K"}'),
    ):
        assert not of.accepts(grammar, thought + wrong), wrong


@pytest.mark.parametrize("thinking", ThinkingFormat)
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_before_a_call_the_text_is_free(of: Judge, form: CallFormat, thinking: Any) -> None:
    grammar = of.writer.calls(form, use(), thinking)
    thought = THOUGHTS[thinking]
    for right in ("Hello", "Grüße 🌍\n\n", weather(form), "", "a < b, `c`\n```py\n```"):
        assert of.accepts(grammar, thought + right), right
    for wrong in (form.call_text("other", "{}"), weather(form, "{}"), weather(form) + "x"):
        assert not of.accepts(grammar, thought + wrong), wrong
    if form.trigger:
        assert of.accepts(grammar, thought + "I look it up.\n" + weather(form))
        assert not of.accepts(grammar, thought + "I look it up.\n" + weather(form, '{"c": 1}'))
        assert not of.accepts(grammar, thought + "x" + form.trigger + " I know")


@pytest.mark.parametrize("form", [HERMES, FENCED], ids=lambda form: form.name)
def test_the_number_of_calls_is_bounded(of: Judge, form: CallFormat) -> None:
    for must_call in (True, False):
        many = of.writer.calls(form, use(must_call=must_call), ThinkingFormat.NONE)
        calls = [weather(form)] * form.most_calls
        assert of.accepts(many, form.separator.join(calls))
        assert not of.accepts(many, form.separator.join([*calls, weather(form)]))
        one = of.writer.calls(
            form, use(must_call=must_call, is_parallel=False), ThinkingFormat.NONE
        )
        assert of.accepts(one, weather(form))
        assert not of.accepts(one, form.separator.join([weather(form)] * 2))


def test_a_llama_makes_one_call_and_no_other_object(of: Judge) -> None:
    grammar = of.writer.calls(LLAMA_JSON, use(), ThinkingFormat.NONE)
    assert not of.accepts(grammar, weather(LLAMA_JSON) + weather(LLAMA_JSON))
    assert not of.accepts(grammar, '{"a": 1}')
    assert not of.accepts(grammar, ' {"a": 1}')


def test_tools_that_are_not_allowed_are_not_called(of: Judge) -> None:
    grammar = of.writer.calls(HERMES, use(callable_names=frozenset({"now"})), ThinkingFormat.NONE)
    assert of.accepts(grammar, HERMES.call_text("now", "{}"))
    assert not of.accepts(grammar, weather(HERMES))


def test_a_spelled_tag_begins_no_call_either() -> None:
    """A model may write a tag with other tokens than the one of the tag."""
    tokens = judge(*TAGS)
    grammar = tokens.writer.calls(HERMES, use(), ThinkingFormat.NONE)
    assert tokens.accepts(grammar, "Hi <tool_", "cal")
    assert not tokens.accepts(grammar, "Hi <tool_", "call>", " I know")


@pytest.mark.covers("T45")
@pytest.mark.parametrize("must_call", [False, True])
@pytest.mark.parametrize("thinking", [ThinkingFormat.BEGUN, ThinkingFormat.TAGGED])
def test_no_answer_ends_in_its_thinking_with_a_call_or_without(
    of: Judge, thinking: ThinkingFormat, must_call: bool
) -> None:
    """Models write a call where they have not ended the thinking. Where tags are tokens, that of a
    call cannot be drawn there; a call that is spelled is a thought, and the real one follows."""
    grammar = of.writer.calls(HERMES, use(must_call=must_call), thinking)
    begin = "<think>" if thinking is ThinkingFormat.TAGGED else ""
    thought, call = f"{begin}\nI look it up.\n", weather(HERMES)
    for open_end in (thought, thought + call, thought + call + "\n"):
        assert not of.accepts(grammar, open_end), open_end
    closed = f"{thought}</think>\n\n{call}"
    assert of.accepts(grammar, closed)
    assert of.accepts(grammar, f"{thought}{call}\n</think>\n\n{call}") is not bool(of.tags)
    spelled = call.replace("_call>", "_\0call>").split("\0")
    assert of.accepts(grammar, thought, *spelled, f"</think>\n\n{call}")


@pytest.mark.covers("G21")
def test_an_answer_behind_thinking(of: Judge) -> None:
    grammar = of.writer.behind_thinking('asked: "yes" | "no"', ThinkingFormat.BEGUN)
    assert of.accepts(grammar, "\nyes or no?\n</think>\n\nno")
    assert not of.accepts(grammar, "\nyes or no?\n</think>\n\nnot")
    assert not of.accepts(grammar, "no")
    tagged = of.writer.behind_thinking('asked: "yes" | "no"', ThinkingFormat.TAGGED)
    assert of.accepts(tagged, "<think>no?</think>\n\nno")
    assert of.accepts(tagged, "no")
    assert not of.accepts(tagged, "<think>no?</think>\n\nNo")


@pytest.mark.covers("T41")
@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("tags", OTHER_TAGS)
def test_an_answer_behind_thinking_with_other_tags(tags: ThinkingTags, are_tokens: bool) -> None:
    of = Judge(tuple(tags) if are_tokens else (), tags)
    thought = f"\nyes or no? <think>\n{tags.end}\n\n"
    begun = of.writer.behind_thinking('asked: "yes" | "no"', ThinkingFormat.BEGUN)
    tagged = of.writer.behind_thinking('asked: "yes" | "no"', ThinkingFormat.TAGGED)
    for grammar, first in ((begun, ""), (tagged, tags.begin)):
        assert of.accepts(grammar, f"{first}{thought}no")
        assert not of.accepts(grammar, f"{first}{thought}not")
    assert of.accepts(tagged, "no")
    calls = of.writer.calls(HERMES, use(), ThinkingFormat.TAGGED)
    assert of.accepts(calls, f"{tags.begin}{thought}{weather(HERMES)}")
    assert of.accepts(calls, "Hello")
    assert not of.accepts(calls, f"{tags.begin} Hello")


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_an_answer_without_calls_is_what_the_request_asks_for(of: Judge, form: CallFormat) -> None:
    grammar = of.writer.calls(form, use(), ThinkingFormat.NONE, 'asked: "yes" | "no"')
    for right in ("yes", "no", weather(form)):
        assert of.accepts(grammar, right), right
    for wrong in ("maybe", "yes" + weather(form), form.call_text("other", "{}")):
        assert not of.accepts(grammar, wrong), wrong


def test_only_a_strict_tool_is_refused_for_what_cannot_be_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "x"}}}
    schema["not"] = {"required": ["b"]}
    for is_strict in (False, True):
        tool = Tool(name="f", description=None, parameters=schema, is_strict=is_strict)
        asked = ToolUse(tools=(tool,), callable_names=frozenset("f"), must_call=True)
        grammar = judge().writer.calls(HERMES, asked, ThinkingFormat.NONE)
        matcher = LLMatcher(judge().matching, grammar_from("lark", grammar))
        assert matcher.is_error() is is_strict


def test_white_space_precedes_an_answer_only_behind_a_thought(of: Judge) -> None:
    """White space where nothing was thought would be a part of the answer."""
    grammar = of.writer.behind_thinking('asked: "{}"', ThinkingFormat.TAGGED)
    assert of.accepts(grammar, "\n<think>hm</think>\n\n{}")
    assert not of.accepts(grammar, "\n{}")
