"""GBNF is told from Lark by a look at the lines, and translated within bounds."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.gbnf import (
    MAX_GBNF_CHARS,
    MAX_GBNF_RULES,
    MAX_GBNF_WORK,
    Gbnf,
    lark_of_gbnf,
    lark_or_gbnf,
)


@pytest.mark.parametrize(
    "text", ["start: A", "A: /a/\n \t start : A", '%llguidance {"no_forcing": true}\nstart: A']
)
def test_text_with_a_first_rule_of_lark_is_lark(text: str) -> None:
    assert lark_or_gbnf(text, "ebnf") == Grammar(GrammarKind.LARK, text, "ebnf")


@pytest.mark.parametrize("text", ["root ::= start", "", "# start: a", "%llguidances", "x start:"])
def test_any_other_is_gbnf(text: str) -> None:
    assert lark_or_gbnf(text, "ebnf") == Gbnf(text, "ebnf")


def test_an_empty_header_says_nothing() -> None:
    found = lark_or_gbnf("%llguidance {}\n\nstart: A", "ebnf")
    assert found == Grammar(GrammarKind.LARK, "start: A", "ebnf")


def test_a_translation() -> None:
    grammar = lark_of_gbnf(Gbnf('root ::= "a" b-c\nb-c ::= [0-9]+', "ebnf"))
    assert grammar.source == "ebnf"
    assert grammar.text == 'start: "a" B_C\nB_C: /[0-9]/+\n'


@pytest.mark.parametrize("blank", ["\n", " ", "start\n", "start ", "start\n\n\n\n"])
def test_lines_are_looked_at_once(blank: str) -> None:
    """A search that begins again in each blank line would take a minute."""
    text = blank * (100_000 // len(blank)) + "\nstart: A"
    assert isinstance(lark_or_gbnf(text, "ebnf"), Grammar)
    with pytest.raises(InvalidRequest):
        lark_or_gbnf(text.removesuffix("start: A") + "x", "ebnf")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#" * (MAX_GBNF_CHARS + 1), f"ebnf has {MAX_GBNF_CHARS + 1} characters"),
        ("a::=b\n" * (MAX_GBNF_RULES + 1), f"ebnf has {MAX_GBNF_RULES + 1} rules"),
        (
            ("a::=" + "b " * 98 + "\n") * 128,
            f"ebnf has {201 * 128 * 128} characters times rules: wanted at most {MAX_GBNF_WORK}",
        ),
    ],
)
def test_gbnf_has_bounds(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as raised:
        lark_or_gbnf(text, "ebnf")
    assert raised.value.param == "ebnf"


def test_a_text_of_neither_form_is_told_both() -> None:
    for text in ("", "hello", '?start: "a"', 'root: "a"'):
        with pytest.raises(
            InvalidRequest, match=r"neither `root ::=`, as in GBNF, nor .* `start:`"
        ):
            lark_of_gbnf(Gbnf(text, "ebnf"))


@pytest.mark.parametrize(
    "text", ["", "root ::= (", "root ::= x", "a ::= a", "root ::= " + "(" * 5000]
)
def test_what_is_no_grammar_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="ebnf is no grammar: ") as raised:
        lark_of_gbnf(Gbnf(text, "ebnf"))
    assert raised.value.param == "ebnf"
