"""What is counted of a schema is counted on every way by which one comes into a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammars import bounds
from tests.support.grammars.hostile_grammars import many
from tests.support.http.http_edge import make_edge
from tests.support.http.tool_models import hermes_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "Hi"}]
LEAST = -(2**63)
BAD: dict[str, dict[str, Any]] = {
    "15 optional properties at #/properties/a:": {
        "type": "object", "properties": {"a": {"type": "object", "properties": many(15)}},
    },
    "the number -9223372036854775808 at #/properties/a/const:": {
        "type": "object", "properties": {"a": {"const": LEAST}},
    },
    "a `multipleOf` of 1000003 at #/properties/a:": {
        "type": "object", "properties": {"a": {"type": "integer", "multipleOf": 1_000_003}},
    },
}  # fmt: skip


def lark(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps(schema)}"


def chat_tool(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


WAYS: dict[str, Any] = {
    "response_format": lambda s: (CHAT, {"response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": s}}}),
    "guided_json": lambda s: (COMPLETIONS, {"guided_json": s}),
    "guided_json as text": lambda s: (COMPLETIONS, {"guided_json": json.dumps(s)}),
    "structured_outputs.json": lambda s: (COMPLETIONS, {"structured_outputs": {"json": s}}),
    "json_schema": lambda s: (COMPLETIONS, {"json_schema": json.dumps(s)}),
    "guided_grammar": lambda s: (COMPLETIONS, {"guided_grammar": lark(s)}),
    "structured_outputs.grammar": lambda s: (COMPLETIONS, {
        "structured_outputs": {"grammar": lark(s)}}),
    "ebnf": lambda s: (COMPLETIONS, {"ebnf": lark(s)}),
    "nested Lark": lambda s: (COMPLETIONS, {
        "guided_grammar": f"start: %lark {{\n{lark(s)}\n}}"}),
    "beside tools": lambda s: (CHAT, {
        "guided_grammar": lark(s), "tools": [chat_tool({"type": "object"})]}),
    "a strict tool": lambda s: (CHAT, {"tools": [chat_tool(s, strict=True)]}),
    "a tool that is never called": lambda s: (CHAT, {"tools": [chat_tool(s, strict=True)]}),
    "a tool of responses": lambda s: (RESPONSES, {"tools": [
        {"type": "function", "name": "f", "parameters": s, "strict": True}]}),
    "a format of responses": lambda s: (RESPONSES, {"text": {
        "format": {"type": "json_schema", "name": "x", "schema": s}}}),
    "a tool of messages": lambda s: (MESSAGES, {"tools": [
        {"name": "f", "input_schema": s, "strict": True}]}),
}  # fmt: skip
REST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": USER, "max_tokens": 9},
}


@pytest.mark.parametrize("told", BAD)
@pytest.mark.parametrize("way", WAYS)
async def test_no_way_into_a_grammar_is_without_bounds(
    way: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_OPTIONAL", 10)  # a prompt has the schemas of tools too
    path, fields = WAYS[way](BAD[told])
    async with make_edge(model=hermes_model()).client() as client:
        answer = await client.post(path, json={"model": "tiny", **REST[path], **fields})
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
