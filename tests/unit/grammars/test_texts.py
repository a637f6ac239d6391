"""What is compiled: with forcing where no quoted text holds the text of an added token."""

from __future__ import annotations

import pytest

from grammars.texts import compiled_text

ADDED = ("<|end|>",)


def is_forced(text: str) -> bool:
    compiled = compiled_text(text, ADDED)
    assert compiled.endswith(text)
    return "no_forcing" not in compiled


@pytest.mark.parametrize(
    "text",
    [
        'start: "a<|end|>b"',
        'start: "\\<|end|\\>"',
        "start: /a<|end|>/",
        "start: /\\/\\/<|end|>/",
        '// a "\nstart: "<|end|>"',
        '// a / b\nstart: "<|end|>"',
        'start: "a" "<|end|>"',
        'start: "<|end|>',
    ],
)
def test_text_of_an_added_token_is_not_forced(text: str) -> None:
    assert not is_forced(text)


@pytest.mark.parametrize("text", ['start: "a"', "start: <|end|>", 'start: "a" <|end|> /b/'])
def test_added_tokens_themselves_are(text: str) -> None:
    assert is_forced(text)


@pytest.mark.parametrize("begin", ['start: "a"\n// "', 'start: "', "start: /"])
def test_a_literal_without_an_end_is_read_once(begin: str) -> None:
    """A search that begins again behind each quote would take minutes."""
    assert is_forced(begin + '\\"' * 60_000)
    assert is_forced(begin + '"/' * 60_000)
