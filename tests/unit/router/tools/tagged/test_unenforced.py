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
from grammars.trying.messages import parts_fields, parts_of
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


@pytest.mark.covers("K03")
@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "string", "minLength": 5, "maxLength": 2}, "abc", None),
        ({"type": "string", "pattern": "^a{9}$", "maxLength": 5}, "abc", "a" * 9),
        ({"type": "string", "format": "date", "maxLength": 5}, "abc", "2024-02-29"),
        ({"enum": ["abcdef"], "maxLength": 3}, "abcdef", "abc"),
        ({"type": "string", "enum": ["abcdef"], "pattern": "^x"}, "abcdef", "xyz"),
        ({"const": "a\n</parameter>"}, "abc", None),
        ({"enum": ["a\n</parameter>"], "minLength": 4}, "abcd", None),
        ({"type": "string", "pattern": "^(a\n</parameter>)$"}, "abc", None),
    ],
)
def test_texts_of_which_there_is_none_are_no_dead_end(
    schema: dict[str, Any], taken: str, refused: str | None, *, is_required: bool
) -> None:
    described = of(a={"type": "integer"}, v=schema)
    if not is_required:
        described["required"] = ["a"]
    with pytest.raises(InvalidRequest, match="no text follows it") as error:
        checked(described, is_strict=True)
    assert error.value.param == "tools.0.properties.v"
    grammar = checked(described)
    assert accepts(grammar, {"a": 1, "v": taken})
    assert accepts(grammar, {"a": 1}) is not is_required
    if refused is not None:
        assert not accepts(grammar, {"a": 1, "v": refused})


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_number_or_null_may_be_all_that_is_left_of_a_text(*, is_strict: bool) -> None:
    schema = of(
        n={"type": ["integer", "string"], "pattern": "^[1-9][0-9]*$", "maxLength": 3},
        v={"enum": ["null", None]},
    )
    grammar = checked(schema, is_strict=is_strict)
    assert accepts(grammar, {"n": 12, "v": None})
    assert not accepts(grammar, {"n": "a", "v": None})
    assert not accepts(grammar, {"n": 12, "v": "a"})


def test_what_a_grammar_was_written_from_comes_whole_to_where_it_is_tried() -> None:
    tool = Tool(name="f", description=None, parameters=of(a=AHEAD, b=NAME, c={"type": "object"}))
    use = ToolUse(tools=(tool,), callable_names=frozenset("f"), must_call=True)
    parts = GrammarParts(schemas=judge().writer.schema_parts(QWEN_CODER, use, str))
    assert any(part.may_be_empty for part in parts.schemas)
    assert parts_of(json.loads(json.dumps(parts_fields(parts)))) == parts


@pytest.mark.parametrize("values", [[f"x{at}" for at in range(9000)], ["x", *range(9000)]])
def test_long_lists_that_many_arguments_refer_to_take_bounded_work(values: list[Any]) -> None:
    schema = of(**{f"a{at}": {"$ref": "#/$defs/x", "maxLength": at} for at in range(3000)})
    schema["$defs"] = {"x": {"enum": values}}
    assert "string" in argument_kinds(schema).of("a0")
    with pytest.raises(InvalidRequest, match="more than"):
        checked(schema)
