"""Keywords whose value asks for nothing refuse no schema; those that ask for something still do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from grammars.compiler import GrammarCompiler
from grammars.texts import json_rule
from tests.unit.grammars.matching import follows_schema

NOTHING: tuple[dict[str, Any], ...] = (
    {"title": "x", "description": "x " * 99, "$comment": "x"},
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"not": False},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {"type": ["string", "null"], "description": "a name"}},
    {"propertyNames": True},
    {"propertyNames": {}},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": True, "b": {}}},
    {"dependencies": {}},
    {"contains": {"type": "null"}, "minContains": 0},
    {"minContains": 2},
    {"maxContains": 2},
    {"if": {"type": "null"}},
    {"then": {"type": "null"}, "else": {"type": "null"}},
    {"if": {"type": "null"}, "then": True, "else": {"title": "x"}},
    {"minProperties": 0, "minItems": 0, "minLength": 0, "required": []},
    {"minItems": 0.0},
    {"format": "int64"},
    {"format": "password"},
    {"format": "of our own"},
    {"$comment": "x", "title": "x", "description": "x", "default": 1, "examples": [1]},
    {"readOnly": True, "writeOnly": False, "deprecated": True},
    {"contentEncoding": "base64", "contentMediaType": "text/html", "contentSchema": {"not": {}}},
    {"nullable": True, "discriminator": {"propertyName": "a"}, "x-order": 1, "xml": {}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "uniqueItems": False},
    {"$schema": "http://json-schema.org/schema#"},
    {"$schema": "https://example.com/ours"},
    {"$dynamicAnchor": "x"},
    {"$recursiveAnchor": True},
    {"$id": "https://example.com/x", "$anchor": "a"},
)
LISTS: tuple[dict[str, Any], ...] = (
    {"properties": []},
    {"properties": {"a": []}},
    {"patternProperties": []},
    {"patternProperties": {"a": []}},
    {"additionalProperties": []},
    {"propertyNames": []},
    {"unevaluatedProperties": []},
    {"unevaluatedItems": []},
    {"dependentRequired": []},
    {"dependentSchemas": []},
    {"dependentSchemas": {"a": []}},
    {"dependencies": []},
    {"$defs": [], "definitions": []},
    {"$defs": {"a": []}},
    {"items": []},
    {"prefixItems": []},
    {"prefixItems": [[]]},
    {"anyOf": [[], False]},
    {"contains": [], "minContains": 0},
    {"if": [], "then": []},
)
"""Empty lists in the place of objects, as PHP writes those without fields."""
VALUES = ("1", '"a"', "null", "[]", "[1]", '{"a": 1}')
SOMETHING: tuple[dict[str, Any], ...] = (
    {"uniqueItems": True},
    {"uniqueItems": True, "maxItems": 2},
    {"not": {}},
    {"not": []},
    {"not": {"type": "null"}},
    {"propertyNames": {"pattern": "a"}},
    {"propertyNames": {"type": "string", "maxLength": 3}},
    {"propertyNames": {"type": "integer"}},
    {"propertyNames": False},
    {"unevaluatedProperties": False},
    {"unevaluatedItems": {"type": "null"}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": False}},
    {"contains": {"type": "null"}},
    {"contains": {"type": "null"}, "minContains": 0, "maxContains": 2},
    {"contains": True, "minContains": True},
    {"if": {}, "then": {"type": "null"}},
    {"if": {"type": "null"}, "else": False},
    {"$dynamicRef": "#x"},
    {"format": "idn-email"},
    {"format": "uri-reference"},
    {"format": "regex"},
)


@pytest.mark.covers("K02")
@pytest.mark.parametrize("schema", NOTHING, ids=json.dumps)
def test_what_asks_for_nothing_is_taken(schema: dict[str, Any], compiler: GrammarCompiler) -> None:
    for value in VALUES:
        assert follows_schema(compiler, schema, value), value
        assert follows_schema(compiler, {"items": {"anyOf": [schema, False]}}, f"[{value}]"), value


@pytest.mark.covers("K12")
@pytest.mark.parametrize("schema", LISTS, ids=json.dumps)
def test_an_empty_list_in_the_place_of_an_object_of_a_schema_is_one(
    schema: dict[str, Any], compiler: GrammarCompiler
) -> None:
    test_what_asks_for_nothing_is_taken(schema, compiler)


@pytest.mark.covers("K02")
@pytest.mark.parametrize("schema", SOMETHING, ids=json.dumps)
def test_what_asks_for_something_is_refused(
    schema: dict[str, Any], compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be followed: #"):
        follows_schema(compiler, schema, "1")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"contains": True}, ("[1]", "[1, 2]", "3"), ("[]",)),
        ({"contains": {}, "minContains": 2, "maxItems": 3}, ("[1, 2]",), ("[1]", "[1, 2, 3, 4]")),
        ({"contains": True, "maxContains": 2, "minItems": 0}, ("[1, 2]",), ("[]", "[1, 2, 3]")),
        ({"contains": {}, "minContains": 1.0}, (), ()),
    ],
)
def test_items_of_any_kind_are_counted(
    schema: dict[str, Any],
    right: tuple[str, ...],
    wrong: tuple[str, ...],
    compiler: GrammarCompiler,
) -> None:
    if not right:
        with pytest.raises(InvalidRequest):
            follows_schema(compiler, schema, "[]")
    for text in right:
        assert follows_schema(compiler, schema, text), text
    for text in wrong:
        assert not follows_schema(compiler, schema, text), text


def test_names_of_properties_are_no_keywords(compiler: GrammarCompiler) -> None:
    names = ("format", "if", "contains", "minContains", "uniqueItems", "not", "$schema", "pattern")
    schema = {"type": "object", "properties": {name: {"const": name} for name in names}}
    for name in names:
        assert follows_schema(compiler, schema, json.dumps({name: name}))
        assert not follows_schema(compiler, schema, json.dumps({name: "x"}))


def test_a_dynamic_anchor_is_an_anchor(compiler: GrammarCompiler) -> None:
    schema = {"$defs": {"a": {"$dynamicAnchor": "here", "type": "null"}}, "$ref": "#here"}
    assert follows_schema(compiler, schema, "null")
    assert not follows_schema(compiler, schema, "1")


def test_a_reference_to_an_empty_list_is_one_to_any_value(compiler: GrammarCompiler) -> None:
    schema = {"$defs": {"a": []}, "items": {"$ref": "#/$defs/a"}, "type": "array"}
    assert follows_schema(compiler, schema, "[1, {}]")


def test_an_empty_list_that_is_a_value_stays_one(compiler: GrammarCompiler) -> None:
    schemas: tuple[dict[str, Any], ...] = ({"const": []}, {"enum": [[]]})
    for schema in schemas:
        assert follows_schema(compiler, schema, "[]")
        assert not follows_schema(compiler, schema, "{}")
    assert follows_schema(compiler, {"properties": {"const": {"const": []}}}, '{"const": []}')
    assert not follows_schema(compiler, {"properties": {"const": {"const": []}}}, '{"const": {}}')


def test_texts_about_a_schema_are_not_compiled_and_names_like_theirs_are() -> None:
    notes = {"title": "NOTE", "description": "NOTE", "$comment": "NOTE"}
    named = {name: {"type": "string", **notes} for name in ("title", "description")}
    data = {"enum": [{"title": "a"}]}
    rule = json_rule({"type": "object", "properties": named | {"one": data}, **notes})
    assert "NOTE" not in rule
    properties = json.loads(rule.removeprefix("%json "))["properties"]
    assert properties == {
        "title": {"type": "string"},
        "description": {"type": "string"},
        "one": data,
    }
