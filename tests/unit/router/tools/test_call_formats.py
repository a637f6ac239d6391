"""Every format: what its writer writes, its grammar accepts and its parser reads, however cut."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, grammar_from

from router.tools.answer_parser import AnswerParser, AnswerSyntax
from router.tools.call_format import CallFormat
from router.tools.definitions import Tool, ToolUse
from router.tools.formats import FORMATS, GLM, MISTRAL, MISTRAL_ARGS, QWEN_CODER, format_of
from router.tools.parts import CallArguments, CallStart, Part, TextPart, ThinkingPart
from router.tools.stop_scope import stop_scope
from router.tools.thinking import ThinkingFormat
from tests.support.examples import everyday
from tests.unit.router.tools.grammar_judge import Judge

Calls = list[tuple[str, dict[str, Any]]]

TAGGED = [form for form in FORMATS.values() if form.tagged]
SEVERAL = [form for form in FORMATS.values() if form.most_calls > 1]


@cache
def judge(form: CallFormat, are_tokens: bool) -> Judge:
    return Judge(tuple(sorted(form.tags)) if are_tokens else ())


def tool(name: str = "f", *, required: Sequence[str] | None = None, **properties: Any) -> Tool:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
    return Tool(name=name, description=None, parameters=schema)


def use(*tools: Tool, **fields: Any) -> ToolUse:
    names = frozenset(one.name for one in tools)
    asked: dict[str, Any] = {"tools": tools, "callable_names": names, "must_call": True}
    return ToolUse(**asked | fields)


def syntax_of(form: CallFormat, *tools: Tool, **fields: Any) -> AnswerSyntax:
    names = tuple(one.name for one in tools)
    return AnswerSyntax(call_format=form.name, call_names=names, kinds=form.kinds(tools), **fields)


def joined(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    thought = text = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case ThinkingPart(more):
                thought += more
            case TextPart(more):
                text += more
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, more):
                assert index == len(calls) - 1
                assert more
                calls[index] = (calls[index][0], calls[index][1] + more)
    return thought, text, calls


def parsed(pieces: Sequence[str], syntax: AnswerSyntax) -> Any:
    parser = AnswerParser(syntax)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.push("", is_last=True)])


def cut(text: str, at: Sequence[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(at), len(text)])]


def accepted(form: CallFormat, asked: ToolUse, text: str, *, are_tokens: bool = False) -> bool:
    of = judge(form, are_tokens)
    return of.accepts(of.writer.calls(form, asked, ThinkingFormat.NONE), text)


JSON = json.dumps
TEXTS = st.text(
    st.sampled_from('ab<>/="{}[]\\\n\t é😀0-1.,:')
    | st.characters(codec="utf-8", exclude_categories=["Cc"]),
    max_size=12,
)
VALUES: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "text": ({"type": "string"}, TEXTS),
    "word": ({"enum": ["C", "F d", "a/b"]}, st.sampled_from(["C", "F d", "a/b"])),
    "code": ({"type": "string", "pattern": "^[A-Z]{3}$"}, st.sampled_from(["ABC", "XYZ"])),
    "short": (
        {"type": "string", "minLength": 2, "maxLength": 4},
        st.sampled_from(["ab", "\n\n\n"]),
    ),
    "whole": ({"type": "integer"}, st.integers(-1000, 1000)),
    "flag": ({"type": "boolean"}, st.booleans()),
    "maybe": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, st.none() | TEXTS),
    "count": ({"type": ["integer", "string"]}, st.integers(-99, 99) | TEXTS),
    "list": (
        {"type": "array", "items": {"type": "string"}},
        st.lists(TEXTS, max_size=3),
    ),
    "one_or_more": (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        st.lists(st.integers(0, 9), max_size=3) | st.sampled_from(["a", "", "1, 2", "a[1]"]),
    ),
    "object": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"],
         "additionalProperties": False},
        st.fixed_dictionaries({"a": TEXTS}),
    ),
}  # fmt: skip


NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"


def is_writable(name: str, value: Any) -> bool:
    """Whether a value is told from one of another kind, and holds no tag."""
    if not isinstance(value, str):
        return True
    return not (name == "maybe" and value == "null") and not (
        name == "count" and re.fullmatch(NUMBER, value)
    )


@st.composite
def calls_of_tools(draw: Any) -> tuple[list[Tool], list[tuple[str, str]]]:
    """Tools, and calls of them in JSON, in the order of their schemas."""
    tools, made = [], []
    for number in range(draw(st.integers(1, 2))):
        names = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True))
        optional = draw(st.sets(st.sampled_from(names))) if names else set()
        tools.append(
            tool(
                f"f{number}",
                required=[one for one in names if one not in optional],
                **{one: VALUES[one][0] for one in names},
            )
        )
        arguments = {}
        for one in names:
            if one in optional and draw(st.booleans()):
                continue
            value = draw(VALUES[one][1])
            arguments[one] = value if is_writable(one, value) else "a text"
        made.append((f"f{number}", JSON(arguments, ensure_ascii=False)))
    return tools, made


@pytest.mark.covers("G14", "G18", "G25")
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
@settings(max_examples=everyday(15, of=100), deadline=None)
@given(calls_of_tools(), st.booleans(), st.randoms(use_true_random=False))
def test_what_is_written_is_accepted_and_read_however_it_is_cut(
    form: CallFormat,
    drawn: tuple[list[Tool], list[tuple[str, str]]],
    are_tokens: bool,
    draw: random.Random,
) -> None:
    tools, calls = drawn
    calls = calls[: form.most_calls]
    text = form.calls_text(calls)
    syntax = syntax_of(form, *tools)
    _, said, found = whole = parsed([text], syntax)
    assert said == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == [
        (name, json.loads(arguments)) for name, arguments in calls
    ]
    assert parsed(list(text), syntax) == whole
    for _ in range(4):
        at = draw.choices(range(len(text) + 1), k=draw.randint(1, 5))
        assert parsed(cut(text, at), syntax) == whole
    assert accepted(form, use(*tools), text, are_tokens=are_tokens)


CITY = tool("get_weather", required=["city"], city={"type": "string"}, days={"type": "integer"})
NOW = tool("now")
PARIS = '{"city": "Paris"}'


@pytest.mark.covers("G20")
@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_neighbours_of_a_call_are_refused(form: CallFormat, are_tokens: bool) -> None:
    def takes(name: str, arguments: str) -> bool:
        text = form.call_text(name, arguments)
        return accepted(form, use(CITY, NOW), text, are_tokens=are_tokens)

    assert takes("get_weather", PARIS)
    assert takes("get_weather", '{"city": "Paris", "days": 3}')
    assert takes("now", "{}")
    assert not takes("get_weathe", PARIS)
    assert not takes("get_weather", "{}")
    assert not takes("get_weather", '{"days": 3}')
    assert not takes("get_weather", '{"town": "Paris"}')
    assert not takes("get_weather", '{"city": "Paris", "town": "Rome"}')
    assert not takes("get_weather", '{"city": "Paris", "days": "three"}')
    assert not takes("now", PARIS)


@pytest.mark.parametrize("form", SEVERAL, ids=lambda form: form.name)
def test_several_calls_are_read_behind_text(form: CallFormat) -> None:
    text = "I look.\n" + form.calls_text([("get_weather", PARIS), ("now", "{}")]) + "\n"
    wanted = ("", "I look.", [("get_weather", PARIS), ("now", "{}")])
    syntax = syntax_of(form, CITY, NOW)
    for at in range(len(text) + 1):
        assert parsed(cut(text, [at]), syntax) == wanted, at


@pytest.mark.parametrize("form", SEVERAL, ids=lambda form: form.name)
def test_one_call_where_calls_are_not_parallel(form: CallFormat) -> None:
    asked = use(CITY, NOW, is_parallel=False)
    assert accepted(form, asked, form.call_text("now", "{}"))
    assert not accepted(form, asked, form.calls_text([("now", "{}")] * 2))
    assert accepted(form, use(NOW), form.calls_text([("now", "{}")] * 16))
    assert not accepted(form, use(NOW), form.calls_text([("now", "{}")] * 17))


@pytest.mark.parametrize("form", SEVERAL, ids=lambda form: form.name)
def test_no_more_calls_than_the_most_are_read(form: CallFormat) -> None:
    text = form.calls_text([("now", "{}")] * (form.most_calls + 2))
    _, said, calls = whole = parsed([text], syntax_of(form, NOW))
    assert calls == [("now", "{}")] * form.most_calls
    assert said.count("now") == 2
    assert parsed(list(text), syntax_of(form, NOW)) == whole


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_call_of_an_unknown_function_is_text(form: CallFormat) -> None:
    text = form.call_text("other", PARIS)
    syntax = syntax_of(form, CITY, NOW)
    for at in range(len(text) + 1):
        assert parsed(cut(text, [at]), syntax) == ("", text, []), at


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_call_that_is_cut_off_has_the_arguments_so_far(form: CallFormat) -> None:
    text = form.call_text("get_weather", PARIS)
    syntax = syntax_of(form, CITY)
    begun = set()
    for size in range(len(text) + 1):
        parser = AnswerParser(syntax)
        _, said, calls = joined(parser.push(text[:size], is_last=True))
        assert said in ("", text[:size])
        if calls:
            assert said == ""
            ((name, arguments),) = calls
            assert name == "get_weather"
            assert PARIS.startswith(arguments)
            assert parser.is_in_arguments is (arguments != PARIS)
            assert parser.ends_in_calls is (arguments == PARIS)
            begun.add(arguments)
    assert len(begun) > 5, "they come while they are written"


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_calls_behind_thinking_and_outside_the_search_of_stop_strings(form: CallFormat) -> None:
    call = form.call_text("get_weather", PARIS)
    syntax = syntax_of(form, CITY, thinking=ThinkingFormat.TAGGED)
    text = f"<think>\n{call}\n</think>\n\n{call}"
    assert parsed(list(text), syntax) == (call, "", [("get_weather", PARIS)])
    scope = stop_scope(syntax)
    assert scope is not None
    new = [one for char in text for one in scope.push(char)]
    assert "".join(one.searched for one in new) == ""
    assert "".join(one.called for one in new) == call
    of = judge(form, False)
    grammar = of.writer.calls(form, use(CITY), ThinkingFormat.TAGGED)
    assert of.accepts(grammar, f"<think>hm</think>\n\n{call}")


@pytest.mark.covers("G26")
@pytest.mark.parametrize("form", [MISTRAL, MISTRAL_ARGS], ids=lambda form: form.name)
@pytest.mark.parametrize("said", ["a [list] of [1, 2]", "[TOOL_", "[TOOL_CALLS", "x [ARGS]{}", "["])
def test_brackets_in_text_begin_no_call(form: CallFormat, said: str) -> None:
    for at in range(len(said) + 1):
        assert parsed(cut(said, [at]), syntax_of(form, CITY)) == ("", said, [])
    text = said + " " + form.call_text("get_weather", PARIS)
    if not said.startswith("[TOOL_CALLS"):
        assert parsed(list(text), syntax_of(form, CITY)) == ("", said, [("get_weather", PARIS)])
    assert accepted(form, use(CITY, must_call=False), text)


@pytest.mark.covers("G26")
@pytest.mark.parametrize("are_tokens", [False, True])
def test_a_call_of_mistral_may_have_an_id_and_a_space(are_tokens: bool) -> None:
    with_id = f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{PARIS}"
    spaced = MISTRAL.call_text("get_weather", PARIS).replace("[TOOL_CALLS]", "[TOOL_CALLS] ")
    for form, text in ((MISTRAL_ARGS, with_id), (MISTRAL_ARGS, with_id * 2), (MISTRAL, spaced)):
        assert accepted(form, use(CITY), text, are_tokens=are_tokens)
        for at in range(len(text) + 1):
            said, calls = parsed(cut(text, [at]), syntax_of(form, CITY))[1:]
            assert said == ""
            assert set(calls) == {("get_weather", PARIS)}
    short = with_id.replace("a1B2c3D4e", "a1B2c3D4")
    assert not accepted(MISTRAL_ARGS, use(CITY), short, are_tokens=are_tokens)


ODD_TEXTS = [
    "", "\n", "\n\na\n", " a ", "12", "1.5", "true", "null", '"q"', "{", "[1]", '{"a": 1}', "a < b",
    "<b>", "</function>", "</tool_call>", "<parameter=x>", "<tool_call>\n<function=f>", "\\n", "\\",
    "\x00\t", "é😀",
]  # fmt: skip


@pytest.mark.covers("G25")
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
@pytest.mark.parametrize("value", ODD_TEXTS)
def test_a_text_is_what_stands_between_the_tags(form: CallFormat, value: str) -> None:
    one = tool(text={"type": "string"}, more={"type": "string"})
    arguments = JSON({"text": value, "more": value}, ensure_ascii=False)
    text = form.call_text("f", arguments)
    assert accepted(form, use(one), text)
    for at in range(len(text) + 1):
        assert parsed(cut(text, [at]), syntax_of(form, one)) == ("", "", [("f", arguments)]), at


@pytest.mark.covers("G25")
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
def test_a_text_leaves_as_it_comes(form: CallFormat) -> None:
    one = tool(text={"type": ["string", "null"]}, count={"type": "integer"})
    text = form.call_text("f", '{"text": "nul or a \\"<\\" ", "count": 12}')
    parser = AnswerParser(syntax_of(form, one))
    came = [
        (part.text, char)
        for char in text
        for part in parser.push(char)
        if isinstance(part, CallArguments)
    ]
    pieces = [piece for piece, _ in came]
    assert pieces[:6] == ['{"text": ', '"nul ', "o", "r", " ", "a"]
    assert '\\"' in pieces
    assert "".join(pieces) == '{"text": "nul or a \\"<\\" ", "count": 12}'


@pytest.mark.covers("G25")
def test_qwens_closing_tag_within_a_line_is_text() -> None:
    value = "<parameter=a>x</parameter>\n  </parameter> y"
    one = tool(text={"type": "string"})
    arguments = JSON({"text": value})
    text = QWEN_CODER.call_text("f", arguments)
    assert accepted(QWEN_CODER, use(one), text)
    assert parsed(list(text), syntax_of(QWEN_CODER, one))[2] == [("f", arguments)]


@pytest.mark.covers("G25")
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
def test_a_closing_tag_within_json_ends_nothing(form: CallFormat) -> None:
    assert form.tagged is not None
    one = tool(value={"type": "array", "items": {"type": "object"}})
    arguments = JSON({"value": [{"a": form.tagged.end, "b": [{"c": "}]"}]}]})
    text = form.call_text("f", arguments)
    assert parsed(list(text), syntax_of(form, one))[2] == [("f", arguments)]
    assert accepted(form, use(one), text)


REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}, "to": {"allOf": [{"$ref": "#/$defs/To"}]}},
    "required": ["unit", "to"],
    "$defs": {
        "Unit": {"enum": ["C", "F"], "description": "of it"},
        "To": {"type": "object", "properties": {"u": {"$ref": "#/$defs/Unit"}}},
    },
    "additionalProperties": {"type": "integer"},
}


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
def test_references_and_other_arguments(form: CallFormat, are_tokens: bool) -> None:
    one = Tool(name="f", description=None, parameters=REFERRING)
    for arguments, is_right in (
        ({"unit": "C", "to": {"u": "F"}}, True),
        ({"unit": "C", "to": {"u": "F"}, "unity": 5, "x": 6}, True),
        ({"unit": "K", "to": {"u": "F"}}, False),
        ({"unit": "C", "to": {"u": "K"}}, False),
        ({"unit": "C", "to": "F"}, False),
        ({"unit": "C", "to": {}, "x": "text"}, False),
        ({"unit": "C", "to": {}, "unit ": "C"}, False),
        ({"unit": "C"}, False),
    ):
        text = form.call_text("f", JSON(arguments))
        assert accepted(form, use(one), text, are_tokens=are_tokens) is is_right, arguments
        if is_right:
            ((_, read),) = parsed(list(text), syntax_of(form, one))[2]
            assert json.loads(read) == arguments


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
def test_an_argument_of_the_schema_is_no_other_argument(form: CallFormat, are_tokens: bool) -> None:
    one = Tool(name="f", description=None, parameters=REFERRING)
    once = form.call_text("f", JSON({"unit": "C", "to": {}, "x": 5}))
    twice = form.call_text("f", JSON({"unit": "C", "to": {}, "unix": 5})).replace("unix", "unit")
    assert accepted(form, use(one), once, are_tokens=are_tokens)
    assert not accepted(form, use(one), twice, are_tokens=are_tokens)


@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
def test_no_text_holds_the_tag_that_ends_it(form: CallFormat) -> None:
    """Not where its schema wants more text behind it either: the parser would end it there."""
    assert form.tagged is not None
    value = f"a{form.tagged.end}b"
    for schema in ({"minLength": len(value)}, {"pattern": "a.*\n*.*b$"}, {"enum": [value, "c"]}):
        one = tool(value={"type": "string", **schema})
        assert not accepted(form, use(one), form.call_text("f", JSON({"value": value})))


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "minLength": 1, "maxLength": 3}, ["a", "\né\n"], ["", "abcd"]),
        ({"type": "string", "pattern": "^a+$|b"}, ["aaa", "xbx"], ["aax", "c"]),
        ({"type": "string", "pattern": r"\d"}, ["a1"], ["a", "a١"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-02-29x", "x"]),
        ({"type": "string", "const": "a/b"}, ["a/b"], ["a", "a/bc"]),
        ({"enum": ["a", None, "null "]}, ["a", None, "null "], ["b", 5]),
        ({"anyOf": [{"enum": ["a"]}, {"type": "integer"}]}, ["a", 5], ["b", 1.5, "5x"]),
        ({"type": "integer", "minimum": 3, "maximum": 5}, [3, 5], [2, 6, "a"]),
        ({"type": ["string", "object"]}, ["a{}", {}, {"a": 1}], ["{x"]),
        ({"type": ["integer", "string"]}, [5, "5x", "12 rue", "-", "1.5.", ""], [1.5, 1e100]),
        ({"type": ["null", "boolean", "string"]}, [None, True, "nullx", "truefalse", "n"], []),
        ({"oneOf": [{"type": "boolean"}, {"type": "number"}]}, [True, 1.5], ["a", None]),
        (
            {"enum": ["1x", 1, -2.5, True, None, {"a": 1}]},
            ["1x", 1, -2.5, True, None, {"a": 1}],
            [10, 2.5, False, "x", {"a": 2}],
        ),
        ({"anyOf": [{"type": "string"}, {"const": False}]}, ["a", False], [True]),
        ({"anyOf": [{"enum": ["a", 1]}, {"type": "null"}]}, ["a", 1, None], [2, True]),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, ["12", "true", "[]"], ["a"]),
        (
            {"allOf": [{"type": ["string", "number"]}, {"type": ["string", "integer"]}]},
            ["a", 1],
            [1.5],
        ),
    ],
)
def test_what_a_schema_says_of_a_text_is_enforced(
    form: CallFormat, are_tokens: bool, schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    one = tool(value=schema)
    for values, is_right in ((right, True), (wrong, False)):
        for value in values:
            text = form.call_text("f", JSON({"value": value}, ensure_ascii=False))
            assert accepted(form, use(one), text, are_tokens=are_tokens) is is_right, value
            for pieces in ([text], list(text)) if is_right else ():
                ((_, read),) = parsed(pieces, syntax_of(form, one))[2]
                assert json.loads(read) == {"value": value}


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_many_tools_compile(form: CallFormat, are_tokens: bool) -> None:
    tools = [
        tool(f"f{number}", text={"type": "string", "description": f"{number}"}, required=(),
             **{f"n{number}": {"type": "integer", "title": f"{number}"}})
        for number in range(250)
    ]  # fmt: skip
    of = judge(form, are_tokens)
    grammar = of.writer.calls(form, use(*tools), ThinkingFormat.NONE)
    matcher = LLMatcher(of.matching, grammar_from("lark", grammar))
    assert not matcher.is_error(), matcher.get_error()
    if form.tagged:
        assert grammar.count("%json") < 10


GLM_TEMPLATE = "<tool_call>{{ c.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>"


@pytest.mark.covers("J32")
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<tool_call>\n{{ c | tojson }}\n</tool_call>", "hermes"),
        ("<tool_call>\n<function={{ c.name }}>\n<parameter={{ k }}>\n</tool_call>", "qwen3_coder"),
        ("<seed:tool_call>\n<function={{ c.name }}>\n<parameter={{ k }}>", "seed_oss"),
        (GLM_TEMPLATE, "glm45"),
        (GLM_TEMPLATE.replace("\n", ""), "glm47"),
        ("[TOOL_CALLS][{{ c | tojson }}]", "mistral"),
        ("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments }}", "mistral_args"),
        ("[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.arguments }}", "mistral_args"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>", "deepseek_v31"),
        ('<minimax:tool_call>\n<invoke name="{{ c.name }}">', "minimax_m2"),
        ("<|tool_call|>{{ calls | tojson }}", "granite"),
        ("<|python_tag|>", "llama3_json"),
        ("{{- '{\"name\": \"' + c.name + '\", ' }}\n    {{- '\"parameters\": ' }}", "llama3_json"),
        ('Respond in the format {"name": a name, "parameters": a dictionary}.', "llama3_json"),
        ("```tool_call", "fenced"),
    ],
)
def test_the_format_of_a_template(source: str, name: str) -> None:
    found = format_of(source)
    assert found is not None
    assert found.name == name


@pytest.mark.covers("J32")
@pytest.mark.parametrize(
    "source",
    [
        # Functions, whose schemas have that name, and calls with names of their own.
        '{"name": "{{ t.name }}", "description": "{{ t.description }}", "parameters": {{ p }}}',
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ n }}", "parameters": {{ a }}}]',
        "<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>{{ a }}",
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>",
        "<|tool_call_start|>[{{ c.name }}({{ c.arguments }})]<|tool_call_end|>",
        "<TOOLCALL>[{{ c | tojson }}]</TOOLCALL>",
        "<tool_calls>[{{ c | tojson }}]</tool_calls>",
    ],
)
def test_the_template_of_another_format_is_none_of_these(source: str) -> None:
    assert format_of(source) is None


def test_a_long_name_of_an_argument_ends_the_arguments() -> None:
    text = f"<tool_call>now\n<arg_key>{'x' * 600}"
    _, said, calls = parsed(list(text), syntax_of(GLM, NOW))
    assert calls == [("now", "{}")]
    assert said.startswith("xxx")
    assert parsed([text], syntax_of(GLM, NOW)) == ("", said, calls)


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
def test_any_text_may_be_a_value_of_a_list_or_a_pattern(form: CallFormat, are_tokens: bool) -> None:
    texts = [one for one in ODD_TEXTS if not (are_tokens and any(tag in one for tag in form.tags))]
    listed = tool(value={"enum": [*texts, "a\x7fb", "\r\x0b"]})
    matched = tool(value={"type": "string", "pattern": "^a\n/\t[ /]é$|^\\^\\$[|)]$"})
    for one, values in (
        (listed, [*texts, "a\x7fb", "\r\x0b"]),
        (matched, ["a\n/\t/é", "^$|", "^$)"]),
    ):
        for value in values:
            text = form.call_text("f", JSON({"value": value}))
            assert accepted(form, use(one), text, are_tokens=are_tokens), value
            wrong = form.call_text("f", JSON({"value": value + "x"}))
            assert not accepted(form, use(one), wrong, are_tokens=are_tokens), value


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
@pytest.mark.parametrize("is_open", [False, True])
def test_any_name_of_an_argument(form: CallFormat, are_tokens: bool, is_open: bool) -> None:
    names = ["a b", "é😀", "a.b-c/d", "x$y", "a'b", "[a]", "a\\n", "{}", "-"]
    schema = {
        "type": "object",
        "properties": {key: {"type": "string"} for key in names},
        "required": names[:1],
        "additionalProperties": is_open,
    }
    one = Tool(name="f", description=None, parameters=schema)
    text = form.call_text("f", JSON(dict.fromkeys(names, "v"), ensure_ascii=False))
    assert accepted(form, use(one), text, are_tokens=are_tokens)
    ((_, read),) = parsed(list(text), syntax_of(form, one))[2]
    assert json.loads(read) == dict.fromkeys(names, "v")
    other = form.call_text("f", JSON({"a b": "v", "other": "w"}))
    assert accepted(form, use(one), other, are_tokens=are_tokens) is is_open
