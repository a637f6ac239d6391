"""The first call of an answer is where the parser finds it, whatever pieces the answer comes in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.tools.answer_parser import AnswerSyntax
from router.tools.call_search import call_search
from router.tools.fenced import FENCED
from router.tools.formats import HERMES, LLAMA_JSON
from router.tools.thinking import ThinkingFormat

HERMES_CALL = HERMES.call_text("now", "{}")
FENCED_CALL = FENCED.call_text("now", "{}")
LLAMA_CALL = LLAMA_JSON.call_text("now", "{}")
NONE, THINKS, BEGUN = ThinkingFormat.NONE, ThinkingFormat.TAGGED, ThinkingFormat.BEGUN


def found(pieces: Sequence[str], syntax: AnswerSyntax) -> tuple[str, str]:
    search = call_search(syntax)
    assert search is not None
    before = calls = ""
    for piece in pieces:
        free, called = search.push(piece)
        assert not (free and calls)
        before, calls = before + free, calls + called
    free, called = search.push("", is_last=True)
    return before + free, calls + called


@pytest.mark.parametrize(
    ("call_format", "thinking", "before", "calls"),
    [
        ("hermes", NONE, "I look.\n", HERMES_CALL + "\n" + HERMES_CALL),
        ("hermes", NONE, "a < b <tool", ""),
        ("hermes", NONE, "", HERMES_CALL),
        ("hermes", BEGUN, f"a{HERMES_CALL}</think>\n\n", HERMES_CALL),
        ("hermes", BEGUN, f"a{HERMES_CALL}</thi", ""),
        ("hermes", THINKS, f" <think>a{HERMES_CALL}</think>", HERMES_CALL),
        ("hermes", THINKS, "<t", HERMES_CALL),
        ("hermes", THINKS, "Hi <think>", HERMES_CALL + "</think>"),
        ("fenced", NONE, "```python\n```\n", FENCED_CALL),
        ("llama3_json", NONE, "", "\n " + LLAMA_CALL),
        ("llama3_json", NONE, "Hi " + LLAMA_CALL, ""),
        ("llama3_json", BEGUN, LLAMA_CALL + "</think>", "\n\n" + LLAMA_CALL),
        ("llama3_json", THINKS, "", LLAMA_CALL),
    ],
)
def test_an_answer_is_cut_where_its_first_call_begins(
    call_format: str, thinking: ThinkingFormat, before: str, calls: str
) -> None:
    syntax = AnswerSyntax(thinking=thinking, call_format=call_format)
    text = before + calls
    assert found([text], syntax) == (before, calls)
    assert found(list(text), syntax) == (before, calls)
    for at in range(len(text)):
        assert found([text[:at], text[at:]], syntax) == (before, calls), at


def test_calls_that_stand_alone_are_not_searched_in_text() -> None:
    syntax = AnswerSyntax(call_format="hermes", calls_alone=True)
    text = f'{{"a": "{HERMES_CALL}"}}'
    assert found(list(text), syntax) == (text, "")
    assert found(list("\n" + HERMES_CALL), syntax) == ("", "\n" + HERMES_CALL)


def test_text_is_held_only_while_it_may_begin_a_call() -> None:
    search = call_search(AnswerSyntax(call_format="hermes"))
    assert search is not None
    assert search.push("Hi <") == ("Hi ", "")
    assert search.push("b") == ("<b", "")


def test_an_answer_without_calls_is_not_searched() -> None:
    assert call_search(AnswerSyntax(thinking=THINKS)) is None
