"""Answers in harmony: their parts, their thinking and what of them is searched, in any pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.tools.answer_parser import AnswerParser, AnswerSyntax, whole_answer
from router.tools.harmony.message_cut import Place, place_behind
from router.tools.harmony.tags import MARKS, marked
from router.tools.parts import CallArguments, CallStart, TextPart, ThinkingPart
from router.tools.stop_scope import stop_scope
from router.tools.thinking import ThinkingFormat

NAMES = ("get_weather", "now")
PARIS = '{"city": "Paris {<|end|}"}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
Read = tuple[str, str, list[tuple[str, str]], bool]
"""Thinking, text, calls, and whether it ends in calls."""


def syntax(place: Place = Place.HEADER, *, thinks: bool = True) -> AnswerSyntax:
    thinking = ThinkingFormat.TAGGED if thinks else ThinkingFormat.NONE
    return AnswerSyntax(thinking=thinking, call_names=NAMES, place=place)


def read(text: str, place: Place = Place.HEADER, *, thinks: bool = True) -> Read:
    parser = AnswerParser(syntax(place, thinks=thinks))
    answer = whole_answer(parser, marked(text))
    return answer.thinking, answer.text, list(answer.calls), parser.ends_in_calls


WEATHER = [("get_weather", PARIS)]
COMMENTARY = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}"
SAMPLES: dict[str, tuple[str, Read]] = {
    "a text": ("<|channel|>final<|message|>Hello", ("", "Hello", [], False)),
    "a thought and a text": (
        f"{THOUGHT}<|channel|>final<|message|> Hello\n<|return|>",
        ("Hm.", " Hello\n", [], False),
    ),
    "a call": (f"{THOUGHT}{COMMENTARY}<|call|>", ("Hm.", "", WEATHER, True)),
    "a call whose end is not shown": (f"{THOUGHT}{COMMENTARY}", ("Hm.", "", WEATHER, True)),
    "a call with the recipient before the channel": (
        f" to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}<|call|>",
        ("", "", WEATHER, True),
    ),
    "a call on the channel of thinking": (
        f"{THOUGHT}<|channel|>analysis to=functions.get_weather code<|message|>\n{PARIS}<|call|>",
        ("Hm.", "", WEATHER, True),
    ),
    "a call without the namespace, and without a type": (
        f"<|channel|>commentary to=get_weather<|message|>{PARIS}<|call|>",
        ("", "", WEATHER, True),
    ),
    "a type behind the name, without a space": (
        f"<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{PARIS}",
        ("", "", WEATHER, True),
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.now<|message|> <|call|>",
        ("", "", [("now", "{}")], True),
    ),
    "a call that ends before its arguments": (
        "<|channel|>commentary to=functions.now<|message|> ",
        ("", "", [], False),
    ),
    "a call that is cut off": (
        '<|channel|>commentary to=functions.now<|message|>{"a": ',
        ("", "", [("now", '{"a": ')], False),
    ),
    "a call that is not whole before one that is": (
        '<|channel|>commentary to=functions.now<|message|>{"a": <|end|><|start|>assistant'
        "<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        ("", "", [("now", '{"a": '), ("now", "{}")], False),
    ),
    "a remark, two calls, and a text behind": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{COMMENTARY}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>So.<|return|>",
        ("", "I look.\n\nSo.", [*WEATHER, ("now", "{}")], True),
    ),
    "two thoughts": (
        f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>x",
        ("Hm.\n\nHm.", "x", [], False),
    ),
    "words behind a call's end": (
        f"{COMMENTARY}<|call|>commentary<|channel|>final<|message|>x",
        ("", "x", WEATHER, True),
    ),
    "text behind arguments": (f"{COMMENTARY} \n a b<|call|>", ("", "a b", WEATHER, True)),
    "another function": (
        '<|channel|>commentary to=functions.other<|message|>{"a": 1}<|call|>',
        ("", '{"a": 1}', [], False),
    ),
    "arguments that are none": (
        "<|channel|>commentary to=functions.now code<|message|> print()<|call|>",
        ("", " print()", [], False),
    ),
    "a tool that nobody gave, in thinking": (
        "<|channel|>analysis to=browser.search code<|message|>x<|call|>",
        ("x", "", [], False),
    ),
    "a channel that nobody defined": ("<|channel|>comment<|message|>x", ("", "x", [], False)),
    "no channel": ("<|message|>x<|return|>", ("", "x", [], False)),
    "two channels": (
        "<|channel|>commentary<|channel|>analysis<|message|>x",
        ("x", "", [], False),
    ),
    "a message that does not end": (
        "<|channel|>analysis<|message|>x<|channel|>final<|message|>y",
        ("x", "y", [], False),
    ),
    "a text that does not end": (
        "<|channel|>final<|message|>y<|channel|>analysis<|message|>x",
        ("x", "y", [], False),
    ),
    "a header without a message, at the end": (
        f"{THOUGHT}<|channel|>final Hello there, you.",
        ("Hm.", "Hello there, you.", [], False),
    ),
    "white space between messages": (
        "<|channel|>analysis<|message|>x<|end|>\n<|start|>assistant<|channel|>final<|message|>y",
        ("x", "y", [], False),
    ),
    "words in a header": (
        "<|start|>assistant--commentary<|channel|>final more words<|message|>y",
        ("", "y", [], False),
    ),
    "a text without a header": ("Hello <|end|>world<|return|>", ("", "Hello \n\nworld", [], False)),
    "a header without a message": (
        "<|channel|>final Hello there.<|return|>",
        ("", "Hello there.", [], False),
    ),
    "a thought without a message": (
        "<|channel|>analysis it is so<|end|><|start|>assistant<|channel|>final<|message|>y",
        ("it is so", "y", [], False),
    ),
    "a long text without a header": ("word " * 80, ("", "word " * 80, [], False)),
    "a long header": (
        f"<|channel|>analysis {'word ' * 80}<|end|>",
        ("word " * 80, "", [], False),
    ),
    "tags within a text": (
        "<|channel|>final<|message|>a<|constrain|>b<|message|>c",
        ("", "abc", [], False),
    ),
    "a header that is cut off": (f"{THOUGHT}<|channel|>comm", ("Hm.", "", [], False)),
    "a recipient that is cut off": (f"{THOUGHT} to=functions.n", ("Hm.", "", [], False)),
    "a role that is cut off": (
        "<|channel|>analysis<|message|>x<|end|><|start|>assis",
        ("x", "", [], False),
    ),
    "a constraint that is cut off": (
        "<|channel|>commentary to=functions.now <|constrain|>js",
        ("", "", [], False),
    ),
    "nothing": ("", ("", "", [], False)),
    "ends alone": ("<|end|><|return|><|call|><|start|>", ("", "", [], False)),
}


@pytest.mark.covers("T46", "T47")
@pytest.mark.parametrize(("text", "wanted"), SAMPLES.values(), ids=SAMPLES)
def test_the_parts_of_an_answer(text: str, wanted: Read) -> None:
    assert read(text) == wanted


def test_a_tag_that_is_spelled_is_text() -> None:
    spelled = "Write <|channel|>final<|message|>, then <|end|>"
    answer = whole_answer(AnswerParser(syntax()), marked("<|channel|>final<|message|>") + spelled)
    assert (answer.thinking, answer.text) == ("", spelled)


def test_what_is_thought_is_text_where_it_is_not_told_apart() -> None:
    text = f"{THOUGHT}<|channel|>final<|message|>x"
    assert read(text, thinks=False) == ("", "Hm.\n\nx", [], False)


@pytest.mark.parametrize(
    ("place", "text", "wanted"),
    [
        (Place.TEXT, "lo<|return|>", ("", "lo", [], False)),
        (Place.TEXT, f"lo<|end|><|start|>assistant{COMMENTARY}", ("", "lo", WEATHER, True)),
        (Place.THOUGHT, "x<|end|><|start|>assistant<|message|>y", ("x", "y", [], False)),
        (Place.BETWEEN, "<|start|>assistant<|channel|>final<|message|>y", ("", "y", [], False)),
    ],
)
def test_an_answer_begins_where_its_prompt_ends(place: Place, text: str, wanted: Read) -> None:
    assert read(text, place) == wanted


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", Place.HEADER),
        ("<|start|>user<|message|>Hi<|end|>", Place.BETWEEN),
        ("<|start|>assistant<|channel|>final<|message|>Hel", Place.TEXT),
        ("<|start|>assistant<|channel|>analysis<|message|>", Place.THOUGHT),
    ],
)
def test_the_place_where_an_answer_begins(prompt: str, place: Place) -> None:
    assert place_behind(prompt) is place


WORDS = [
    *MARKS,
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=",
    "functions.now",
    "{}",
    "a b",
]
TEXTS = st.one_of(
    st.sampled_from([text for text, _ in SAMPLES.values()]),
    st.lists(st.sampled_from([*WORDS, '{"a": "', "\n", " ", "x" * 90]), max_size=30).map("".join),
)


def counted(one: AnswerSyntax, pieces: list[str]) -> int:
    tokens = one.thinking_tokens()
    assert tokens is not None
    for piece in pieces:
        tokens.push(piece)
    return tokens.num


@pytest.mark.covers("T46")
@given(TEXTS, st.lists(st.integers(0, 400)), st.sampled_from(list(Place)[1:]), st.booleans())
@example("word " * 80, [250, 257, 258], Place.HEADER, True)
@example(f"<|channel|>final {'a ' * 130}to=b c", [250, 257, 258], Place.HEADER, True)
def test_an_answer_is_the_same_in_any_pieces(
    text: str, cuts: list[int], place: Place, thinks: bool
) -> None:
    text = marked(text)
    at = [0, *sorted(min(one, len(text)) for one in cuts), len(text)]
    one = syntax(place, thinks=thinks)
    whole = whole_answer(AnswerParser(one), text)
    parser = AnswerParser(one)
    parts = [part for a, b in pairwise(at) for part in parser.push(text[a:b])]
    parts += parser.push("", is_last=True)
    thinking = "".join(part.behind_text for part in parts if isinstance(part, ThinkingPart))
    said = "".join(part.behind_text for part in parts if isinstance(part, TextPart))
    names = [part.name for part in parts if isinstance(part, CallStart)]
    calls = tuple(
        (name, "".join(p.text for p in parts if isinstance(p, CallArguments) and p.number == n))
        for n, name in enumerate(names)
    )
    assert (thinking, said, calls) == (whole.thinking, whole.text, whole.calls)
    assert not set(MARKS.values()) & set(thinking + said + "".join(map("".join, calls)))
    scope = stop_scope(one)
    assert scope is not None
    scoped = [new for a, b in pairwise(at) for new in scope.push(text[a:b])]
    scoped += scope.push("", is_last=True)
    assert "".join(map("".join, scoped)) == text, "nothing is left out"


@pytest.mark.covers("T46")
@given(TEXTS)
def test_no_word_of_a_message_is_lost(text: str) -> None:
    """Between `MESSAGE` and the tag behind it all is thought, said, or an argument."""
    messages = [one.partition("<|message|>")[2] for one in f"<|message|>{text}".split("<|start|>")]
    bodies = [one for one in messages if one and not any(tag in one for tag in MARKS)]
    thinking, said, calls, _ = read(f"<|message|>{text}")
    shown = "".join((thinking, said, *(arguments for _, arguments in calls)))
    for body in bodies:
        assert body.strip() in shown or not body.strip()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (THOUGHT, 5),  # and not `<|start|>` and the role, which are of the next message
        (f"{THOUGHT}<|channel|>final<|message|>x", 5),
        (f"{THOUGHT}{THOUGHT}", 12),
        ("<|channel|>analysis<|message|>Hm.", 4),
        (f"<|channel|>final<|message|>x<|end|><|start|>assistant{THOUGHT}", 7),
        (f"<|channel|>final<|message|>x{THOUGHT}", 5),
        (COMMENTARY, 0),
        ("<|channel|>analysis to=functions.now<|message|>{}", 0),
    ],
)
def test_tokens_of_thinking_are_those_of_its_messages(text: str, wanted: int) -> None:
    for tag in (*MARKS, "assistant"):
        text = text.replace(tag, f"\0{tag}\0")
    pieces = [marked(one) for one in text.split("\0") if one]
    assert counted(syntax(), pieces) == wanted
