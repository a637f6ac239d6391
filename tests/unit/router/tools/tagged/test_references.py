"""Arguments between tags whose schemas refer to parts of the schema of all, wherever these are."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from common.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from grammars.compiler import GrammarCompiler
from grammars.parts import GrammarParts
from router.tools.definitions import Tool, ToolUse
from router.tools.formats import HERMES, SEED
from router.tools.thinking import ThinkingFormat
from tests.unit.router.tools.grammar_judge import Judge


@cache
def judge() -> Judge:
    return Judge(())


def followed(schema: dict[str, Any], form: Any = SEED) -> str:
    """The text of the grammar that is followed for the calls of a strict tool."""
    tool = Tool(name="f", description=None, parameters=schema, is_strict=True)
    use = ToolUse(tools=(tool,), callable_names=frozenset("f"), must_call=True)
    text = judge().writer.calls(form, use, ThinkingFormat.NONE)
    parts = judge().writer.schema_parts(form, use, lambda number: f"tools.{number}")
    grammar = Grammar(GrammarKind.LARK, text, "tools")
    return GrammarCompiler(judge().matching).check(grammar, GrammarParts(schemas=parts)).text


def accepts(grammar: str, arguments: dict[str, Any], form: Any = SEED) -> bool:
    return judge().accepts(grammar, form.call_text("f", json.dumps(arguments)))


def of(properties: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **fields,
    }


POINT = of({"x": {"type": "integer"}})


@pytest.mark.covers("G25")
@pytest.mark.parametrize("form", [SEED, HERMES], ids=lambda form: form.name)
@pytest.mark.parametrize(
    "to",
    [
        {"$ref": "#/properties/from"},
        {"allOf": [{"$ref": "#/properties/from"}], "description": "as from"},
        {"$ref": "#/$defs/Point"},
        {"$ref": "#/definitions/Point"},
        {"$ref": "#/definitions/a%20b~1c"},
        {"$ref": "#/properties/all/items"},
    ],
)
def test_a_reference_may_point_anywhere(form: Any, to: dict[str, Any]) -> None:
    schema = of(
        {"from": POINT, "all": {"type": "array", "items": {"$ref": "#/properties/from"}}, "to": to},
        **{
            "$defs": {"Point": {"$ref": "#/definitions/Point"}},
            "definitions": {"Point": POINT, "a b/c": {"$ref": "#/$defs/Point"}},
        },
    )
    grammar, point = followed(schema, form), {"x": 1}
    assert accepts(grammar, {"from": point, "all": [point], "to": point}, form)
    assert not accepts(grammar, {"from": point, "all": [point], "to": {}}, form)
    assert not accepts(grammar, {"from": point, "all": [{"x": "1"}], "to": point}, form)


def test_a_reference_to_all_is_an_object_of_all() -> None:
    schema = of({"name": {"type": "string"}, "inner": {"$ref": "#"}})
    schema["required"] = ["name"]
    grammar = followed(schema)
    assert accepts(grammar, {"name": "a", "inner": {"name": "b", "inner": {"name": "c"}}})
    assert not accepts(grammar, {"name": "a", "inner": {"inner": {"name": "c"}}})
    assert not accepts(grammar, {"name": "a", "inner": "b"})


def test_what_is_no_schema_is_no_reference() -> None:
    value = {"$ref": "#/properties/n"}
    grammar = followed(of({"n": {"type": "integer"}, "v": {"const": value}}))
    assert accepts(grammar, {"n": 1, "v": value})
    assert not accepts(grammar, {"n": 1, "v": 2})


def test_an_argument_may_have_the_name_of_a_keyword() -> None:
    names = ("enum", "const", "default", "$ref", "properties")
    inner = of({name: {"$ref": "#/properties/n"} for name in names})
    grammar = followed(of({"n": {"type": "integer"}, "v": inner}))
    assert accepts(grammar, {"n": 1, "v": dict.fromkeys(names, 2)})
    assert not accepts(grammar, {"n": 1, "v": dict.fromkeys(names, "a")})


def test_definitions_are_copied_only_where_they_are_referred_to() -> None:
    definitions = {f"d{at}": of({f"p{at}": {"enum": ["x" * 4000, 1]}}) for at in range(40)}
    schema = of(
        {f"a{at}": {"$ref": f"#/$defs/d{at}"} for at in range(40)}, **{"$defs": definitions}
    )
    text = followed(schema)
    assert len(text) < MAX_GRAMMAR_BYTES
    assert followed(schema, HERMES)
