"""What is compiled: with forcing where no quoted text holds the text of an added token."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.compiler import GrammarCompiler
from grammars.texts import choice_grammar, compiled_text
from tests.unit.grammars.matching import follows

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


@pytest.mark.covers("K06")
@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\d{4}-\d{2}", "2024-02", "\u0662\u0660\u0662\u0664-\u0660\u0662"),
        (r"\d{4}", "2024", "\U0001fbf8" * 4),
        (r"[\d]", "7", "\u0667"),
        (r"[^\d]", "\u0667", "7"),
        (r"\D", "\u0667", "7"),
        (r"[\D]", "\u0667", "7"),
        (r"\s{2}x", " \tx", "\u205f\u205fx"),
        (r"[\s,]", " ", "\u00a0"),
        (r"\S", "\u00a0", " "),
        (r"[^\s]", "\u00a0", "\n"),
        (r"(?x) \s a", " a", "a"),
        (r"\w", "_", "\u00e9"),
        (r"\W", "\u00e9", "a"),
        (r"[\w-]{2}", "a-", "\u00e9-"),
        (r"[^\W\d]", "a", "7"),
        (r"\\d", "\\d", "7"),
        (r"\\\d", "\\7", "\\\u0667"),
        (r"\p{Nd}", "\u0667", "a"),
        (r"[[:digit:]]", "7", "\u0667"),
        (r"a/\d", "a/7", "a/\u0667"),
    ],
)
def test_classes_of_an_expression_are_ascii(
    pattern: str, right: str, wrong: str, compiler: GrammarCompiler
) -> None:
    grammar = Grammar(GrammarKind.REGEX, pattern, "guided_regex")
    assert follows(compiler, grammar, right)
    assert not follows(compiler, grammar, wrong)


@pytest.mark.parametrize("pattern", [r"\bab\b", r"a\B", r"(?=a)a", r"(a)\1", "a^b", r"\Z"])
def test_what_no_expression_has_is_refused_in_words(
    pattern: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest, match="the regular expression cannot be followed: ") as no:
        compiler.matcher(Grammar(GrammarKind.REGEX, pattern, "guided_regex"))
    assert no.value.param == "guided_regex"


@pytest.mark.covers("K07")
@pytest.mark.parametrize("choice", [" a b", "  ", "\n", "a ", "\u00a0x", '"', "\\d", "a/b", "\x7f"])
def test_a_choice_is_its_text(choice: str, compiler: GrammarCompiler) -> None:
    grammar = choice_grammar([choice, "other"], "guided_choice")
    assert follows(compiler, grammar, choice)
    assert not follows(compiler, grammar, choice.strip() + "x")
