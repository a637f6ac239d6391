"""Stop strings are searched after the thinking and before the first call, however text is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.tools.answer_parser import PLAIN, AnswerSyntax
from router.tools.fenced import FENCED
from router.tools.formats import HERMES, LLAMA_JSON
from router.tools.stop_scope import Scoped, stop_scope
from router.tools.thinking import ThinkingFormat

HERMES_CALL = HERMES.call_text("now", "{}")
FENCED_CALL = FENCED.call_text("now", "{}")
LLAMA_CALL = LLAMA_JSON.call_text("now", "{}")
NONE, THINKS, BEGUN = ThinkingFormat.NONE, ThinkingFormat.TAGGED, ThinkingFormat.BEGUN


def found(pieces: Sequence[str], syntax: AnswerSyntax) -> Scoped:
    scope = stop_scope(syntax)
    assert scope is not None
    new = [one for piece in pieces for one in scope.push(piece)]
    new += scope.push("", is_last=True)
    parts = [part for one in new for part in enumerate(one) if part[1]]
    assert [at for at, _ in parts] == sorted(at for at, _ in parts)
    return Scoped(*("".join(text for at, text in parts if at == kind) for kind in range(3)))


@pytest.mark.parametrize(
    ("call_format", "thinking", "thought", "searched", "called"),
    [
        ("", BEGUN, "a\n\nb</think>\n\n", "Hi\n</think>", ""),
        ("", BEGUN, "a</thi", "", ""),
        ("", THINKS, "\n<think>a</think>", "Hi", ""),
        ("", THINKS, "", "\n<thi", ""),
        ("", THINKS, "", " Hi <think>a</think>", ""),
        ("hermes", NONE, "", "I look.\n", HERMES_CALL + "\n" + HERMES_CALL),
        ("hermes", NONE, "", "a < b <tool", ""),
        ("hermes", NONE, "", "", HERMES_CALL),
        ("hermes", BEGUN, f"a{HERMES_CALL}</think>\n\n", "", HERMES_CALL),
        ("hermes", BEGUN, f"a{HERMES_CALL}</think>\n\n", "I look.\n", HERMES_CALL),
        ("hermes", BEGUN, f"a{HERMES_CALL}</thi", "", ""),
        ("hermes", THINKS, f" <think>a{HERMES_CALL}</think>", "", HERMES_CALL),
        ("hermes", THINKS, "", "<t", HERMES_CALL),
        ("hermes", THINKS, "", "Hi <think>", HERMES_CALL + "</think>"),
        ("fenced", NONE, "", "```python\n```\n", FENCED_CALL),
        ("llama3_json", NONE, "", "", "\n " + LLAMA_CALL),
        ("llama3_json", NONE, "", "Hi " + LLAMA_CALL, ""),
        ("llama3_json", NONE, "", "\n ", ""),
        ("llama3_json", BEGUN, LLAMA_CALL + "</think>\n\n", "", LLAMA_CALL),
        ("llama3_json", THINKS, "", "", LLAMA_CALL),
    ],
)
def test_an_answer_is_cut_where_its_thinking_ends_and_its_first_call_begins(
    call_format: str, thinking: ThinkingFormat, thought: str, searched: str, called: str
) -> None:
    syntax = AnswerSyntax(thinking=thinking, call_format=call_format)
    text = thought + searched + called
    assert found([text], syntax) == (thought, searched, called)
    assert found(list(text), syntax) == (thought, searched, called)
    for at in range(len(text)):
        assert found([text[:at], text[at:]], syntax) == (thought, searched, called), at


def test_calls_that_stand_alone_are_not_searched_in_text() -> None:
    syntax = AnswerSyntax(call_format="hermes", calls_alone=True)
    text = f'{{"a": "{HERMES_CALL}"}}'
    assert found(list(text), syntax) == ("", text, "")
    assert found(list("\n" + HERMES_CALL), syntax) == ("", "", "\n" + HERMES_CALL)


def test_text_is_held_only_while_it_may_begin_a_call() -> None:
    scope = stop_scope(AnswerSyntax(call_format="hermes"))
    assert scope is not None
    assert scope.push("Hi <") == [("", "Hi ", "")]
    assert scope.push("b") == [("", "<b", "")]


def test_thinking_is_held_only_while_it_may_end() -> None:
    scope = stop_scope(AnswerSyntax(thinking=BEGUN))
    assert scope is not None
    assert scope.push("a <") == [("a ", "", "")]
    assert scope.push("b") == [("<b", "", "")]


def test_an_answer_that_is_text_alone_is_searched_as_it_is() -> None:
    assert stop_scope(PLAIN) is None
