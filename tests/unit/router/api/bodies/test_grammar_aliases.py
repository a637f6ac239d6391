"""Other servers' fields for a grammar: each becomes the grammar that it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from common.grammar import Grammar, GrammarKind
from tests.support.http.http_edge import make_edge

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
LARK = 'start: "yes" | "no"'


async def grammar_of(**fields: Any) -> Grammar:
    edge = make_edge()
    async with edge.client() as client:
        reply = await client.post("/v1/completions", json={"prompt": "Hi"} | fields)
    assert reply.status_code == 200, reply.text
    (call,) = edge.generator.calls
    assert call.sampling.grammar is not None
    return call.sampling.grammar


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            GrammarKind.JSON_SCHEMA,
            SCHEMA_TEXT,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
        ({"guided_json": SCHEMA_TEXT}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
        ({"json_schema": SCHEMA_TEXT}, GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
            GrammarKind.JSON_SCHEMA,
            SCHEMA_TEXT,
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": None}},
            GrammarKind.JSON_SCHEMA,
            SCHEMA_TEXT,
        ),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, GrammarKind.LARK, LARK),
        ({"guided_choice": ["yes", "no"]}, GrammarKind.LARK, LARK),
        ({"structured_outputs": {"grammar": LARK}}, GrammarKind.LARK, LARK),
        ({"guided_grammar": LARK}, GrammarKind.LARK, LARK),
        ({"ebnf": LARK}, GrammarKind.LARK, LARK),
    ],
)
async def test_each_field_becomes_its_grammar(
    fields: dict[str, Any], kind: GrammarKind, text: str
) -> None:
    grammar = await grammar_of(**fields)
    assert grammar == Grammar(kind, text)


async def test_any_object_has_three_names() -> None:
    wanted = await grammar_of(response_format={"type": "json_object"})
    assert wanted.kind is GrammarKind.JSON_SCHEMA
    assert await grammar_of(guided_json_object=True) == wanted
    assert await grammar_of(structured_outputs={"json_object": True}) == wanted
