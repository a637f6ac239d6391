"""The text of a call's one argument: every cut of its JSON gives the same text."""

from __future__ import annotations

import json

import pytest

from router.tools.text_argument import TextArgument

PATCH = '*** Begin Patch\n+print("é \\ 😀")\t{}\x01\n*** End Patch'


def text_of(pieces: list[str]) -> str:
    reader = TextArgument("input")
    return "".join(reader.push(piece) for piece in pieces)


@pytest.mark.parametrize("ensure_ascii", [True, False])
@pytest.mark.parametrize("text", ["", "a", PATCH, '\\"', "\\\\u0041", "😀😀", '"', "\\u"])
def test_every_cut_gives_the_text(text: str, ensure_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ensure_ascii)
    assert text_of([arguments]) == text
    assert text_of(list(arguments)) == text
    for at in range(len(arguments)):
        assert text_of([arguments[:at], arguments[at:]]) == text


def test_text_leaves_as_it_comes() -> None:
    reader = TextArgument("input")
    assert [reader.push(piece) for piece in ('{"inp', 'ut": "', "ab", "\\", "n", "c")] == [
        *("", "", "ab", "", "\n", "c")
    ]


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"\ud83d\ude00", "😀"),
        (r"\ud83d", "\ufffd"),
        (r"\ude00", "\ufffd"),
        (r"\ud83dx", "\ufffdx"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\ud83d\u0041", "\ufffdA"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"\\ud83d", "\\ud83d"),
    ],
)
def test_half_a_pair_is_no_text(escaped: str, text: str) -> None:
    arguments = f'{{"input": "{escaped}"}}'
    assert text_of([arguments]) == text
    for at in range(len(arguments)):
        assert text_of([arguments[:at], arguments[at:]]) == text, at


@pytest.mark.parametrize("arguments", ["{}", "", '{"other": "x"}', "[]"])
def test_other_arguments_have_no_text(arguments: str) -> None:
    assert text_of(list(arguments)) == ""


def test_a_call_that_was_cut_off_has_the_text_so_far() -> None:
    assert text_of(['{"input": "ab\\u00']) == "ab"
