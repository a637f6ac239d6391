"""What calls with tagged arguments cannot enforce: left out, or refused of a strict tool."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.compiler import GrammarCompiler
from grammars.parts import GrammarParts
from router.tools.definitions import Tool, ToolUse
from router.tools.formats import GLM, QWEN_CODER
from router.tools.tagged.kinds import argument_kinds
from router.tools.thinking import ThinkingFormat
from tests.unit.router.tools.grammar_judge import Judge


@cache
def judge() -> Judge:
    return Judge(tuple(sorted(GLM.tags)))


def checked(schema: dict[str, Any], *, is_strict: bool = False) -> str:
    """The text of the grammar that is followed for the calls of a tool, as a node checks it."""
    tool = Tool(name="f", description=None, parameters=schema, is_strict=is_strict)
    use = ToolUse(tools=(tool,), callable_names=frozenset("f"), must_call=True)
    writer = judge().writer
    text = writer.calls(QWEN_CODER, use, ThinkingFormat.NONE)
    parts = writer.schema_parts(QWEN_CODER, use, lambda number: f"tools.{number}")
    compiler = GrammarCompiler(judge().matching)
    grammar = Grammar(GrammarKind.LARK, text, "tools")
    return compiler.check(grammar, GrammarParts(schemas=parts)).text


def of(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def accepts(grammar: str, arguments: dict[str, Any]) -> bool:
    return judge().accepts(grammar, QWEN_CODER.call_text("f", json.dumps(arguments)))


AHEAD = {"type": "string", "pattern": "^(?=a)b$", "maxLength": 3}
NAME = {"type": "string", "pattern": "^[a-z]+$"}


@pytest.mark.covers("K03")
def test_of_a_tool_that_is_not_strict_that_pattern_is_left_out_and_nothing_else() -> None:
    grammar = checked(of(a=AHEAD, b=NAME, c={"type": "array", "items": {"pattern": "(?=a)"}}))
    assert accepts(grammar, {"a": "xyz", "b": "abc", "c": ["x"]})
    assert not accepts(grammar, {"a": "wxyz", "b": "abc", "c": []})
    assert not accepts(grammar, {"a": "xyz", "b": "ABC", "c": []})
    assert not accepts(grammar, {"a": "xyz", "b": "abc", "c": "x"})


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        (of(b=NAME, a=AHEAD), "tools.0.properties.a"),
        (of(b=NAME, a={"type": "array", "items": AHEAD}), "tools.0.properties.a"),
        (of(b=NAME) | {"minProperties": 1}, "tools.0"),
        (of(b=NAME) | {"anyOf": [{"required": ["b"]}]}, "tools.0"),
    ],
)
def test_of_a_strict_tool_it_is_refused_with_its_place(schema: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked(schema, is_strict=True)
    assert refused.value.param == param
    assert checked(schema)


def test_what_is_enforced_of_a_strict_tool() -> None:
    grammar = checked(of(b=NAME, n={"type": "integer", "maximum": 3}), is_strict=True)
    assert accepts(grammar, {"b": "abc", "n": 3})
    assert not accepts(grammar, {"b": "abc", "n": 4})


def test_schemas_with_choices_without_end_take_bounded_work() -> None:
    ring: dict[str, Any] = {"type": "object", "anyOf": [{"$ref": "#/$defs/ring"}] * 50}
    schema = of(a={"type": "string", "anyOf": [{"$ref": "#/$defs/ring"}] * 50})
    schema["$defs"] = {"ring": ring}
    assert argument_kinds(schema).of("a")


def test_copies_of_what_is_referred_to_are_bounded() -> None:
    schema = of(**{f"a{at}": {"$ref": "#/$defs/x", "maxItems": at} for at in range(3000)})
    schema["$defs"] = {"x": {"type": "array", "items": {"enum": ["x" * 100_000]}}}
    with pytest.raises(InvalidRequest, match="more than"):
        checked(schema)
