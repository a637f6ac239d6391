"""Names of arguments between tags that are long, or hold the tag that ends a name."""

from __future__ import annotations

import json

import pytest

from router.tools.answer_parser import AnswerParser, AnswerSyntax
from router.tools.call_format import CallFormat
from router.tools.definitions import Tool, ToolUse
from router.tools.formats import FORMATS, SEED
from router.tools.parts import CallArguments
from router.tools.thinking import ThinkingFormat
from tests.unit.router.tools.grammar_judge import Judge

TAGGED = [form for form in FORMATS.values() if form.tagged]


def tool(*names: str) -> Tool:
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": list(names),
        "additionalProperties": False,
    }
    return Tool(name="f", description=None, parameters=schema)


def read(form: CallFormat, text: str, size: int, *names: str) -> str:
    """The arguments of the one call in `text`, which comes in pieces of `size` characters."""
    syntax = AnswerSyntax(
        call_format=form.name, call_names=("f",), kinds=form.kinds([tool(*names)])
    )
    parser = AnswerParser(syntax)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [part for piece in pieces for part in parser.push(piece)]
    return "".join(part.text for part in parts if isinstance(part, CallArguments))


@pytest.mark.covers("G25")
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
@pytest.mark.parametrize("length", [200, 235, 250, 256, 257, 300, 1000])
def test_a_long_name_of_the_schema_is_read_however_it_is_cut(form: CallFormat, length: int) -> None:
    name = "k" * length
    text = form.call_text("f", json.dumps({name: "v", "a": "w"}))
    for size in (1, 7, len(text)):
        assert json.loads(read(form, text, size, name, "a")) == {name: "v", "a": "w"}


@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
@pytest.mark.parametrize("length", [230, 250, 256, 257, 300])
def test_a_long_name_of_no_schema_is_cut_off_however_it_comes(
    form: CallFormat, length: int
) -> None:
    text = form.call_text("f", json.dumps({"k" * length: "v"}))
    wanted = {"k" * length: "v"} if length <= 256 else {}
    for size in (1, 7, len(text)):
        assert json.loads(read(form, text, size, "a")) == wanted


@pytest.mark.covers("G25")
@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
def test_a_name_may_hold_what_ends_names(form: CallFormat, are_tokens: bool) -> None:
    assert form.tagged is not None
    names = [f"a{form.tagged.after_key}b", "x>y", 'x">', "x>\n", "a"]
    if are_tokens:
        names = [name for name in names if not any(tag in name for tag in form.tags)]
    arguments = dict.fromkeys(names, "v")
    text = form.call_text("f", json.dumps(arguments))
    judge = Judge(tuple(sorted(form.tags)) if are_tokens else ())
    use = ToolUse(tools=(tool(*names),), callable_names=frozenset("f"), must_call=True)
    assert judge.accepts(judge.writer.calls(form, use, ThinkingFormat.NONE), text)
    for size in (1, 3, len(text)):
        assert json.loads(read(form, text, size, *names)) == arguments


@pytest.mark.parametrize("names", [["x>y", "x>y>z"], ["x>y>z", "x>y"], ["x>y>z", "x", "a"]])
def test_of_names_that_begin_alike_the_longest_is_read(names: list[str]) -> None:
    arguments = {name: f"{number}>0" for number, name in enumerate(names)}
    text = SEED.call_text("f", json.dumps(arguments))
    for size in (1, len(text)):
        assert json.loads(read(SEED, text, size, *names)) == arguments
