"""Answers become the same parts however their text is cut into pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tools.answer_parser import PIECE_CHARS, AnswerParser, AnswerSyntax
from router.tools.call_parser import CallParser
from router.tools.fenced import FENCED
from router.tools.formats import HERMES, LLAMA_JSON
from router.tools.parts import CallArguments, CallStart, Part, TextPart, ThinkingPart
from router.tools.thinking import ThinkingFormat
from tests.support.examples import everyday

Calls = list[tuple[str, str]]
Parsed = tuple[str, str, Calls]
"""What is thought, what is text, and each call's name and arguments."""

WEATHER = '{"city": "Paris", "unit": "C"}'
TRICKY = r'{"text": "a \"}\" \\", "list": [{"x": "</tool_call>"}, "```\n"], "o": {"é": "{["}}'
THINKS = ThinkingFormat.TAGGED
BEGUN = ThinkingFormat.BEGUN
NONE = ThinkingFormat.NONE
NAMES = ("f", "g", "get_weather", "now")


def hermes(name: str = "get_weather", arguments: str = WEATHER) -> str:
    return HERMES.call_text(name, arguments)


def fenced(name: str = "get_weather", arguments: str = WEATHER) -> str:
    return FENCED.call_text(name, arguments)


def llama(name: str = "get_weather", arguments: str = WEATHER) -> str:
    return LLAMA_JSON.call_text(name, arguments)


ONE: Calls = [("get_weather", WEATHER)]
SAMPLES: list[tuple[str, ThinkingFormat, str, Parsed]] = [
    ("hermes", NONE, hermes(), ("", "", ONE)),
    ("hermes", NONE, hermes() + "\n", ("", "", ONE)),
    ("hermes", NONE, "\n\n" + hermes(), ("", "", ONE)),
    ("hermes", NONE, hermes() + "\n" + hermes("now", "{}"), ("", "", [*ONE, ("now", "{}")])),
    ("hermes", NONE, hermes("now", "{}") + "\n" + hermes(), ("", "", [("now", "{}"), *ONE])),
    ("hermes", NONE, hermes() + hermes() + hermes(), ("", "", ONE * 3)),
    ("hermes", NONE, "I look it up.\n" + hermes(), ("", "I look it up.", ONE)),
    ("hermes", NONE, hermes(arguments=TRICKY), ("", "", [("get_weather", TRICKY)])),
    ("hermes", NONE, hermes() + " So.\n", ("", " So.", ONE)),
    ("hermes", NONE, "\n\n" + hermes() + "So.", ("", "So.", ONE)),
    ("hermes", NONE, "Only text, a < b <tool", ("", "Only text, a < b <tool", [])),
    ("hermes", NONE, " spaces \n\n", ("", " spaces \n\n", [])),
    ("hermes", NONE, "", ("", "", [])),
    ("hermes", NONE, "a <tool_call> is a tag", ("", "a <tool_call> is a tag", [])),
    ("hermes", NONE, "<tool_call><tool_call" + hermes(), ("", "<tool_call><tool_call", ONE)),
    ("hermes", NONE, '<tool_call>{"name":"f","arguments":{}}</tool_call>', ("", "", [("f", "{}")])),
    ("hermes", NONE, '<tool_call>\n{"name": "f", "x', ("", '<tool_call>\n{"name": "f", "x', [])),
    ("hermes", NONE, '<tool_call>{"name": "", "arg', ("", '<tool_call>{"name": "", "arg', [])),
    ("hermes", NONE, hermes()[:-8], ("", "", ONE)),
    ("hermes", NONE, "I look.\n" + hermes()[:30], ("", "I look.", [])),
    ("hermes", NONE, hermes() + hermes()[:11], ("", "", ONE)),
    ("hermes", NONE, hermes()[:58], ("", "", [("get_weather", WEATHER[:9])])),
    ("hermes", NONE, hermes()[:-8] + "!", ("", "</to!", ONE)),
    ("hermes", NONE, hermes(arguments='"text"'), ("", hermes(arguments='"text"'), [])),
    ("hermes", THINKS, f"<think>\na{hermes()}</think>\n\n" + hermes(), ("a" + hermes(), "", ONE)),
    ("hermes", THINKS, "<think>a</think>b</think>", ("a", "b</think>", [])),
    ("hermes", THINKS, "Hello <think>a</think>", ("", "Hello <think>a</think>", [])),
    ("hermes", BEGUN, "\nhm < a\n\nb </think>\n\nYes. " + hermes(), ("hm < a\n\nb", "Yes.", ONE)),
    ("hermes", BEGUN, " hm </thi", ("hm </thi", "", [])),
    ("", BEGUN, "x</think> \n y", ("x", "y", [])),
    ("", THINKS, "<think>\n\n</think>\n\n<tool_call>", ("", "<tool_call>", [])),
    ("", THINKS, "\n<thin", ("", "\n<thin", [])),
    ("fenced", NONE, "So:\n\n" + fenced() + "\n", ("", "So:", ONE)),
    ("fenced", NONE, fenced() + "\n" + fenced("f", TRICKY), ("", "", [*ONE, ("f", TRICKY)])),
    ("fenced", NONE, "```python\n```\n``", ("", "```python\n```\n``", [])),
    ("llama3_json", NONE, llama(), ("", "", ONE)),
    ("llama3_json", NONE, "\n " + llama(arguments=TRICKY), ("", "", [("get_weather", TRICKY)])),
    ("llama3_json", NONE, '{"a": 1}', ("", '{"a": 1}', [])),
    ("llama3_json", NONE, "Hi " + llama(), ("", "Hi " + llama(), [])),
    ("llama3_json", NONE, llama() + llama(), ("", llama(), ONE)),
    ("llama3_json", NONE, "\n" + llama()[:20], ("", "", [])),
]  # fmt: skip


def joined(parts: Sequence[Part]) -> Parsed:
    """The parts put together as a client does it; each call begins once and in order."""
    thought = text = ""
    calls: Calls = []
    for part in parts:
        match part:
            case ThinkingPart(more):
                assert (text, calls) == ("", [])
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


def syntax(call_format: str, **fields: Any) -> AnswerSyntax:
    return AnswerSyntax(call_format=call_format, call_names=NAMES, **fields)


def parse(pieces: Sequence[str], call_format: str, thinking: ThinkingFormat) -> Parsed:
    parser = AnswerParser(syntax(call_format, thinking=thinking))
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.push("", is_last=True)
    parsed = joined(parts)
    assert parser.num_calls == len(parsed[2])
    return parsed


def cut(text: str, at: Sequence[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(at), len(text)])]


@pytest.mark.covers("G14", "G15", "T17", "G18", "G20", "T45")
@pytest.mark.parametrize(("call_format", "thinking", "text", "parsed"), SAMPLES)
def test_every_cut_gives_the_same_parts(
    call_format: str, thinking: ThinkingFormat, text: str, parsed: Parsed
) -> None:
    assert parse([text], call_format, thinking) == parsed
    assert parse(list(text), call_format, thinking) == parsed
    for at in range(len(text) + 1):
        assert parse(cut(text, [at]), call_format, thinking) == parsed, at
    draw = random.Random(len(text))
    for _ in range(30):
        at_many = draw.choices(range(len(text) + 1), k=draw.randint(2, 9))
        assert parse(cut(text, at_many), call_format, thinking) == parsed, at_many


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "```tool_call", "```", "<think>", "</think>", "\n", " ",
        '{"name": "f", "arguments": ', '{"name": "f", "parameters": ', "{", "}", '"', "\\", "[",
        "]", '{"a": "b"}', "text", "<", "`", hermes("f", "{}"), fenced("f", "{}"), llama("f", "{}"),
    ]
)  # fmt: skip


@pytest.mark.covers("G14")
@settings(max_examples=everyday(40, of=100))
@given(
    st.lists(PIECES, max_size=12),
    st.sampled_from(["", "hermes", "fenced", "llama3_json"]),
    st.sampled_from(ThinkingFormat),
    st.randoms(use_true_random=False),
)
def test_any_text_gives_the_same_parts_however_it_is_cut(
    pieces: list[str], call_format: str, thinking: ThinkingFormat, draw: random.Random
) -> None:
    text = "".join(pieces)
    whole = parse([text], call_format, thinking)
    assert parse(pieces, call_format, thinking) == whole
    assert parse(list(text), call_format, thinking) == whole
    at = draw.choices(range(len(text) + 1), k=3)
    assert parse(cut(text, at), call_format, thinking) == whole


@pytest.mark.covers("G18")
@settings(max_examples=everyday(40, of=100))
@given(st.dictionaries(st.text(), st.recursive(st.text() | st.integers(), st.lists, max_leaves=5)))
def test_any_arguments_come_through(value: dict[str, object]) -> None:
    for arguments in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        text = "Now. " + hermes("f", arguments) + "\n" + hermes("g", arguments)
        assert parse(cut(text, [len(text) // 2]), "hermes", NONE) == (
            "", "Now.", [("f", arguments), ("g", arguments)]
        )  # fmt: skip


def test_arguments_come_while_they_are_written() -> None:
    parser = AnswerParser(syntax("hermes"))
    text = hermes()
    head = len(HERMES.trigger + HERMES.opening + "get_weather" + HERMES.after_name)
    assert parser.push(text[:head]) == []
    assert parser.push("{") == [CallStart(0, "get_weather"), CallArguments(0, "{")]
    assert parser.push('"ci') == [CallArguments(0, '"ci')]


def test_text_waits_only_while_it_may_begin_a_call() -> None:
    parser = AnswerParser(syntax("hermes"))
    assert parser.push("Hello") == [TextPart("Hello")]
    assert parser.push(" <") == []
    assert parser.push("b") == [TextPart(" <b")]


def test_a_head_that_never_ends_is_text() -> None:
    parser = AnswerParser(syntax("hermes"))
    parts = parser.push("<tool_call>" + " " * 600 + "x")
    assert joined(parts)[1].startswith("<tool_call>   ")


def test_no_more_calls_than_the_most() -> None:
    text = hermes("f", "{}") * 20
    _, rest, calls = parse([text], "hermes", NONE)
    assert len(calls) == HERMES.most_calls == 16
    assert rest == hermes("f", "{}") * 4


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (f'{{"a": "{hermes()}"}}', ("", f'{{"a": "{hermes()}"}}', [])),
        ('{"a": "<tool_call>', ("", '{"a": "<tool_call>', [])),
        ("\n" + hermes() + "\n" + hermes("now", "{}"), ("", "", [*ONE, ("now", "{}")])),
        ("<tool_ca", ("", "<tool_ca", [])),
        ("<tool_call> " + hermes(), ("", "<tool_call> " + hermes(), [])),
    ],
)
def test_calls_that_stand_alone_begin_the_answer(text: str, parsed: Parsed) -> None:
    for pieces in ([text], list(text)):
        parser = AnswerParser(syntax("hermes", calls_alone=True))
        parts = [part for piece in pieces for part in parser.push(piece)]
        assert joined([*parts, *parser.push("", is_last=True)]) == parsed


OTHER = hermes("other", "{}")


@pytest.mark.parametrize(
    ("text", "is_alone", "parsed"),
    [
        (OTHER, False, ("", OTHER, [])),
        (OTHER, True, ("", OTHER, [])),
        ("So.\n" + OTHER + hermes(), False, ("", "So.\n" + OTHER, ONE)),
        (hermes() + OTHER, False, ("", OTHER, ONE)),
        (hermes("get_weathe", "{}"), True, ("", hermes("get_weathe", "{}"), [])),
    ],
)
def test_a_call_of_a_function_that_may_not_be_called_is_text(
    text: str, is_alone: bool, parsed: Parsed
) -> None:
    for at in range(len(text) + 1):
        parser = AnswerParser(syntax("hermes", calls_alone=is_alone))
        parts = [part for piece in cut(text, [at]) for part in parser.push(piece)]
        assert joined([*parts, *parser.push("", is_last=True)]) == parsed


def test_an_answer_ends_in_calls_where_the_arguments_of_all_are_whole() -> None:
    text = "Now.\n" + hermes() + "\n" + hermes()
    heads = [at for at in range(len(text)) if text.startswith("<tool_call>", at)]
    for size in range(len(text) + 1):
        parser = AnswerParser(syntax("hermes"))
        parser.push(text[:size], is_last=True)
        num_begun = sum(size >= at + len("<tool_call>") for at in heads)
        begins = [text.index("{", text.index("arguments", at)) for at in heads]
        ends = [text.index("}", at) for at in begins]
        num_whole = sum(size > at for at in ends)
        assert parser.ends_in_calls is (num_begun == num_whole > 0), size
        assert parser.is_in_arguments is (sum(size > at for at in begins) > num_whole), size


def test_a_whole_answer_is_parsed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a trigger is copied, so a long text with many of them would take seconds."""
    sizes = []
    push = CallParser.push

    def noted(parser: CallParser, text: str) -> list[Part]:
        sizes.append(len(text))
        return push(parser, text)

    monkeypatch.setattr(CallParser, "push", noted)
    text = "<tool_call>" * 1000 + "\n" + hermes()
    assert parse([text], "hermes", NONE) == ("", "<tool_call>" * 1000, ONE)
    assert max(sizes) == PIECE_CHARS < len(text) / 4
