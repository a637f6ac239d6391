"""Which rules of Lark grammars have no text with an end, and that such grammars are refused."""

from __future__ import annotations

from functools import partial

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.compiler import GrammarCompiler
from grammars.endless.endless_rules import endless_rules
from grammars.gbnf import Gbnf, lark_of_gbnf
from tests.support.clocks.lines_run import lines_run
from tests.unit.grammars.matching import follows

ENDLESS = [
    ('start: "a" start', "start"),
    ('start: a\na: "x" b\nb: "y" a', "start, a, b"),
    # One alternative is enough for an answer to be caught in.
    ('start: a | "z"\na: "x" a', "a"),
    ('start: a? "z"\na: "x" a', "a"),
    ('start: [a] "z"\na: "x" a', "a"),
    ('start: (a "y")* "z"\na: "x" a', "a"),
    ('start: a{0,2} "z"\na: "x" a', "a"),
    ('start: a~0..2 "z"\na: "x" a', "a"),
    ('start: a "z"\na: ("x" | "y" a) a', "start, a"),
    ('start: a\na: a+ "x"', "start, a"),
    ('start: a\na: "x" a{2,3}', "start, a"),
    ('start: a\na: "x" a~2', "start, a"),
    ('start: _a\n_a: "x" _a', "start, _a"),
    ('start: a\na[capture]: "x" a', "start, a"),
    ('start: a // :\n  | "z" # | a:\na: "x" a', "a"),
    ('start: %lark {\nstart: b | "y"\nb: "x" b\n}\n', "b"),
    ('start: "a" | x-y\nx-y: "y" x-y', "x-y"),
    ('start: "a" | b\n?c: "y" | b\n?b: "y" b', "b"),
    ('start: "a" | b\nb: %json {"type": "object"} b', "b"),
    ('start: "a" | b\nb: /[:|]\\//i <|im_end|> b', "b"),
]
ENDING = [
    'start: "a" start | "b"',
    'start: "a" start?',
    'start: "a" start*',
    'start: "a" [start]',
    'start: "a"start?"b"',
    'start: "a" b? b?\nb: "x" b | "y"',
    'start: "y" b?\nb: "x"',
    'start: "a" start{0,1}',
    'start: "a" start{,1}',
    'start: "a" start~0..1',
    'start: "a" (start | "b")',
    'start: "a" (start "c")? "b"',
    'start: a\na: | "x" a',
    'start: a\na: "x"\n  | "y" a\n',
    # Nothing refers to it.
    'start: "a"\nb: "x" b',
    'start: a -> b\na: "x"\nb: "x" b',
    'start: A\nA: "a" | "b"',
    'start: "a:b" /start: b/\n%ignore /x:/',
    'start: %json {"properties": {"start": {"enum": [": {[("]}}}',
    'start: %lark {\nstart: "a" start?\n}\n',
    'start: b\nb[suffix=":"]: /x*/',
    '%import common.INT\nstart: INT start | "."',
    '%llguidance {"no_forcing": true}\nstart: "a"',
    'start: "a".."c" start | "."',
]


@pytest.mark.parametrize(("text", "names"), ENDLESS)
def test_a_rule_that_never_ends_is_found_and_its_grammar_refused(
    compiler: GrammarCompiler, text: str, names: str
) -> None:
    assert ", ".join(endless_rules(text)) == names
    with pytest.raises(InvalidRequest) as refused:
        compiler.matcher(Grammar(GrammarKind.LARK, text, "guided_grammar"))
    named = f"the rules {names} have" if "," in names else f"the rule {names} has"
    assert str(refused.value) == f"the grammar cannot be followed: {named} no text with an end"
    assert refused.value.param == "guided_grammar"


@pytest.mark.parametrize("text", ENDING)
def test_what_can_end_is_followed(compiler: GrammarCompiler, text: str) -> None:
    assert endless_rules(text) == []
    compiler.matcher(Grammar(GrammarKind.LARK, text, "guided_grammar"))


def test_rules_in_gbnf_are_found_under_their_names(compiler: GrammarCompiler) -> None:
    endless = lark_of_gbnf(Gbnf('root ::= item | "z"\nitem ::= "x" item', "ebnf"))
    with pytest.raises(InvalidRequest, match="the rule item has no text"):
        compiler.matcher(endless)
    ending = lark_of_gbnf(Gbnf('root ::= "x" root | "z"', "ebnf"))
    assert follows(compiler, ending, "xxz")


def test_what_is_wrong_otherwise_is_told_first(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match='unknown name: "nope"'):
        compiler.matcher(Grammar(GrammarKind.LARK, 'start: "a" start | nope', "guided_grammar"))


@pytest.mark.parametrize(
    "piece",
    ["(", "[", "a [", "a{", "%lark {", '"', "/", "a: a ", "a | ", "~0", "[a:", "%json {", ") ] }"],
)
def test_the_work_grows_with_the_length_whatever_is_read(piece: str) -> None:
    short, long = (
        lines_run(partial(endless_rules, "start: " + piece * times)) for times in (500, 1000)
    )
    assert long < 2.2 * short + 100


def test_many_rules_take_work_in_proportion() -> None:
    def chain(length: int) -> str:
        return "start: r0\n" + "".join(f'r{i}: "x" r{i + 1}\n' for i in range(length))

    short, long = (lines_run(partial(endless_rules, chain(n))) for n in (500, 1000))
    assert long < 2.2 * short
