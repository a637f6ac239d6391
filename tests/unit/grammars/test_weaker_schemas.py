"""What cannot be enforced of a tool that is not strict is left out, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars import bounds, weaker_schemas
from grammars.compiler import GrammarCompiler
from grammars.parts import GrammarParts, SchemaPart
from grammars.texts import json_rule
from grammars.weaker_schemas import Weakening

OTHER = {"type": "integer", "minimum": 3}
ADDRESS = r"^(?!.*\.\.)[a-z.]+@[a-z.]+$"
LEFT: dict[str, tuple[Any, Any]] = {
    "look-ahead": ({"type": "string", "pattern": "^(?!x)a"}, {"type": "string"}),
    "look-behind": ({"type": "string", "pattern": "(?<=x)a"}, {"type": "string"}),
    "a word's boundary": ({"type": "string", "pattern": r"\bab\b"}, {"type": "string"}),
    "a back-reference": ({"type": "string", "pattern": r"(a)\1"}, {"type": "string"}),
    "an e-mail address": (
        {"type": "string", "format": "email", "pattern": ADDRESS},
        {"type": "string", "format": "email"},
    ),
    "no pattern at all": ({"maxLength": 2, "pattern": "("}, {"maxLength": 2}),
    "another document": ({"$ref": "https://example.com/s.json"}, {}),
    "a reference to nothing": ({"$ref": "#/$defs/gone", "type": "null"}, {"type": "null"}),
    "an unknown anchor": ({"items": {"$ref": "#gone"}}, {"items": {}}),
    "an unknown type": ({"type": "any", "maxLength": 2}, {"maxLength": 2}),
    "no type": ({"type": None, "maxLength": 2}, {"maxLength": 2}),
    "types that are none": ({"type": ["string", None]}, {}),
    "int64": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "maximum": 2**63 - 1},
    ),
    "uint64": (
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "minimum": 0},
    ),
    "double": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        {"type": "number"},
    ),
    "float32": (
        {"type": "number", "minimum": -3.4e38, "maximum": 5},
        {"type": "number", "maximum": 5},
    ),
    "a range without a number": ({"type": "integer", "minimum": 10**18}, {"type": "integer"}),
    "the least integer": ({"const": -(2**63)}, {}),
    "an identifier": ({"enum": [1, 2**53 + 1], "type": "integer"}, {"type": "integer"}),
    "many digits": ({"type": "integer", "maximum": 10**400}, {"type": "integer"}),
    "the most digits": (
        {"type": "integer", "exclusiveMinimum": int("9" * 4300), "minimum": 3},
        {"type": "integer", "minimum": 3},
    ),
    "a large remainder": ({"type": "integer", "multipleOf": 1_000_003}, {"type": "integer"}),
    "a small remainder": ({"type": "number", "multipleOf": 1e-300}, {"type": "number"}),
    "too many properties": (
        {"properties": {f"p{i}": {} for i in range(1001)}, "additionalProperties": False},
        {},
    ),
    "too many patterns": ({"allOf": [{"pattern": str(i)} for i in range(13)]}, {}),
    "properties in a list": (
        {"type": "object", "properties": ["a"], "additionalProperties": False},
        {"type": "object"},
    ),
    "a property that is none": (
        {"properties": {"a": None, "b": OTHER}},
        {"properties": {"a": True, "b": OTHER}},
    ),
    "names that are no list": (
        {"properties": {"a": OTHER}, "required": True},
        {"properties": {"a": OTHER}},
    ),
    "nothing for items": ({"type": "array", "items": None}, {"type": "array"}),
    "nothing for an enum": ({"type": "string", "enum": None}, {"type": "string"}),
    "a wrong choice of several": ({"anyOf": [{"pattern": "(?=a)"}, OTHER]}, {"anyOf": [{}, OTHER]}),
    "a wrong pattern of names": (
        {"patternProperties": {"(?=a)": OTHER, "^x": OTHER}, "additionalProperties": False},
        {"patternProperties": {"^x": OTHER}},
    ),
    "patterns that overlap": (
        {"patternProperties": {"a": OTHER, "b": OTHER}},
        {"patternProperties": {"a": OTHER}},
    ),
    "deep within": (
        {"items": {"properties": {"a": {"anyOf": [OTHER, {"items": {"pattern": "(?=a)"}}]}}}},
        {"items": {"properties": {"a": {"anyOf": [OTHER, {"items": {}}]}}}},
    ),
    "itself, and more": (
        {"$ref": "#/$defs/ring", "minItems": 1, "type": "array"},
        {"minItems": 1, "type": "array"},
    ),
}
RING = {"ring": {"$ref": "#/$defs/ring", "type": "array"}}


def followed(compiler: GrammarCompiler, schema: Any) -> dict[str, Any]:
    """The schema that is enforced of a tool's arguments that are described by `schema`."""
    text = f"start: {json_rule(schema, is_lenient=True)}\n"
    part = SchemaPart(schema=schema, source="tools.0.function.parameters", is_lenient=True)
    found = compiler.check(Grammar(GrammarKind.LARK, text, "tools"), GrammarParts(schemas=(part,)))
    made: dict[str, Any] = json.loads(found.text.removeprefix("start: %json "))
    assert made.pop("x-guidance")["lenient"]
    return made


def around(part: Any) -> dict[str, Any]:
    properties = {"before": OTHER, "wrong": part, "behind": OTHER}
    return {"type": "object", "$defs": RING, "properties": properties, "required": ["behind"]}


@pytest.mark.covers("K03")
@pytest.mark.parametrize("name", LEFT)
def test_that_part_is_left_out_and_nothing_else(name: str, compiler: GrammarCompiler) -> None:
    wrong, left = LEFT[name]
    wanted = around(left)
    if name != "itself, and more":
        assert followed(compiler, around(wrong))["properties"] == wanted["properties"]
    else:
        assert followed(compiler, around(wrong))["properties"]["wrong"] == left


KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "patternProperties", "items"),
    *("prefixItems", "additionalItems", "minItems", "maxLength", "minProperties", "pattern"),
    *("format", "minimum", "exclusiveMaximum", "multipleOf", "enum", "const", "anyOf", "oneOf"),
    *("allOf", "$ref", "$defs", "$id", "$anchor", "$schema", "not", "if", "contains"),
    *("uniqueItems", "propertyNames", "dependentRequired", "unevaluatedItems"),
)
ODD: tuple[Any, ...] = (None, "(?=x)", -1, 1.5, 10**40, [], [None], {"a": None}, {"$ref": "x"})


@pytest.mark.covers("K03")
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_no_odd_value_of_a_keyword_refuses_a_tool(keyword: str, compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {f"p{i}": {keyword: value} for i, value in enumerate(ODD)} | {"z": OTHER},
        "required": ["z"],
    }
    made = followed(compiler, schema)
    assert made["properties"]["z"] == OTHER
    assert len(made["properties"]) == len(ODD) + 1


@pytest.mark.covers("K03")
def test_references_keep_their_meaning(compiler: GrammarCompiler) -> None:
    tree: dict[str, Any] = {
        "type": "object",
        "$defs": {"name": {"type": "string", "maxLength": 3}, "bad": {"pattern": "(?=a)"}},
        "properties": {
            "name": {"$ref": "#/$defs/name"},
            "size": OTHER,
            "same": {"$ref": "#/properties/size"},
            "bad": {"$ref": "#/$defs/bad"},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
    }
    wanted = json.loads(json.dumps(tree))
    wanted["$defs"]["bad"] = {}
    assert followed(compiler, tree) == wanted


def test_keywords_are_kept_in_any_order(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["a"],
        "properties": {"a": {"type": "any"}},
    }
    assert followed(compiler, schema) == {**schema, "properties": {"a": {}}}


def test_many_tools_with_one_pattern_keep_the_rest(compiler: GrammarCompiler) -> None:
    properties = {f"p{i}": {"type": "string", "pattern": ADDRESS} for i in range(100)}
    made = followed(compiler, {"type": "object", "properties": properties | {"z": OTHER}})
    assert made["properties"] == {key: {"type": "string"} for key in properties} | {"z": OTHER}


@pytest.mark.parametrize("most_chars", [1 << 19, 1 << 30])
def test_work_is_bounded_and_ends_with_what_passes(
    most_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weaker_schemas, "MAX_TRIED_CHARS", most_chars)
    num_tests = num_chars = 0

    def fails(schema: Any) -> bool:
        nonlocal num_tests, num_chars
        num_tests += 1
        num_chars += len(json.dumps(schema))
        return "bad" in json.dumps(schema)

    parts = {f"p{i}": {"type": "bad", "minimum": i} for i in range(1000)}
    made = Weakening(fails).of({"type": "object", "properties": parts})
    assert num_chars <= most_chars
    assert (num_tests == weaker_schemas.MAX_TRIES) == (most_chars == 1 << 30)
    assert made["properties"]["p0"] == {"minimum": 0}
    assert made["properties"]["p999"] in ({}, True)


def test_a_schema_of_many_levels_takes_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weaker_schemas, "MAX_TRIED_CHARS", 1 << 30)
    schema: dict[str, Any] = {"pattern": "bad"}
    for _ in range(60):
        schema = {"items": schema}
    made = Weakening(lambda one: "bad" in json.dumps(one)).of(schema)
    assert json.dumps(made) == json.dumps(schema).replace('"pattern": "bad"', "")


def test_what_cannot_be_enforced_is_refused_of_a_strict_tool_beside_it(
    compiler: GrammarCompiler,
) -> None:
    strict = SchemaPart(schema=around({"type": "any"}), source="tools.1", is_lenient=False)
    lenient = SchemaPart(schema=around({"pattern": "(?=a)"}), source="tools.0", is_lenient=True)
    rules = [json_rule(one.schema, is_lenient=one.is_lenient) for one in (lenient, strict)]
    text = f"start: a | b\na: {rules[0]}\nb: {rules[1]}\n"
    with pytest.raises(InvalidRequest, match="#/properties/wrong: Invalid type") as refused:
        compiler.check(
            Grammar(GrammarKind.LARK, text, "tools"), GrammarParts(schemas=(lenient, strict))
        )
    assert refused.value.param == "tools.1"


def test_the_deepest_tool_is_within_the_bounds(compiler: GrammarCompiler) -> None:
    schema: dict[str, Any] = {"type": "any"}
    for _ in range(bounds.MAX_DEPTH - 3):
        schema = {"items": schema}
    made = followed(compiler, {"type": "object", "properties": {"a": schema}})
    assert '"any"' not in json.dumps(made)
