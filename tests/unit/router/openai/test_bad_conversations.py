"""Conversations and words that are wrong deep inside: status 400 with the field, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.http_edge import make_edge
from tests.fakes.tool_models import hermes_model

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HALF = "\\ud83d"
"""Half of a surrogate pair, as JSON has it."""


def nested(levels: int) -> str:
    """Text of an object with as many objects and lists within each other."""
    return '{"a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


def chat(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}


def response(arguments: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    return {"input": [call]}


def message(arguments: Any) -> dict[str, Any]:
    block = {"type": "tool_use", "id": "1", "name": "f", "input": json.loads(arguments)}
    return {"max_tokens": 9, "messages": [{"role": "assistant", "content": [block]}]}


async def answered(path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and, of an error, its text."""
    edge = make_edge(model=hermes_model())
    async with edge.client() as client:
        reply = await client.post(path, json=body)
    error = reply.json().get("error") or {}
    return reply.status_code, error.get("message", "")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, chat(nested(65)), "messages.0.tool_calls.0.function.arguments has more than 64"),
        (CHAT, chat(nested(900)), "messages.0.tool_calls.0.function.arguments has more than 64"),
        (CHAT, chat(nested(90_000)), "messages.0.tool_calls.0.function.arguments"),
        (CHAT, chat(json.loads(nested(65))), "messages.0.tool_calls.0.function.arguments has more"),
        (CHAT, chat(f'{{"a": "{HALF}"}}'), "messages.0.tool_calls.0.function.arguments"),
        (CHAT, chat(f'{{"{HALF}": 1}}'), "messages.0.tool_calls.0.function.arguments"),
        (CHAT, chat('{"a": ' + "1" * 5000 + "}"), "messages.0.tool_calls.0.function.arguments"),
        (RESPONSES, response(nested(65)), "input.0.tool_calls.0.function.arguments has more"),
        (RESPONSES, response(f'["{HALF}"]'), "input.0.tool_calls.0.function.arguments"),
        (RESPONSES, response(f'{{"a": "{HALF}"}}'), "input.0.tool_calls.0.function.arguments"),
        (MESSAGES, message(nested(65)), "messages.0.tool_calls.0.function.arguments has more"),
    ],
)
async def test_arguments_of_a_call(path: str, body: dict[str, Any], field: str) -> None:
    status, text = await answered(path, body)
    assert status == 400, text
    assert text.startswith(field)


@pytest.mark.parametrize("arguments", [nested(64), '{"a": "\\ud83d\\ude00"}', "", "{}"])
async def test_arguments_within_the_bounds(arguments: str) -> None:
    assert await answered(CHAT, chat(arguments)) == (200, "")
    assert await answered(RESPONSES, response(arguments)) == (200, "")


@pytest.mark.parametrize("kind", [[], {}, 5, None])
async def test_a_choice_of_tools_of_no_known_type(kind: Any) -> None:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    status, text = await answered(MESSAGES, body | {"tool_choice": {"type": kind}})
    assert status == 400
    assert text.startswith(f"tool_choice.type is {json.dumps(kind)}")


@pytest.mark.parametrize("content", [5, True, "thought", {}, [5], [{"text": 5}]])
async def test_a_thought_that_is_no_list_of_texts(content: Any) -> None:
    body = {"input": [{"type": "reasoning", "content": content}]}
    status, text = await answered(RESPONSES, body)
    assert status == 400
    assert text.startswith("input.0.content")


@pytest.mark.parametrize("content", [[], None])
async def test_a_thought_without_text_is_none(content: Any) -> None:
    thought = {"type": "reasoning", "content": content}
    said = {"role": "user", "content": "Hi"}
    assert await answered(RESPONSES, {"input": [thought, said]}) == (200, "")


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
@pytest.mark.parametrize("field", ["metadata", "user", "reasoning", "tools"])
async def test_numbers_that_no_response_can_repeat(field: str, number: str) -> None:
    """Noticed at the end, the whole answer would be lost."""
    value = {"metadata": "{%s}", "user": "[{%s}]", "reasoning": "{%s}", "tools": "[{%s}]"}[field]
    value = value.replace("%s", f'"a": [{number}]')
    edge = make_edge(model=hermes_model())
    async with edge.client() as client:
        reply = await client.post(RESPONSES, content=f'{{"input": "Hi", "{field}": {value}}}')
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    assert "not finite" in reply.json()["error"]["message"]
    assert not edge.generator.calls


async def test_a_response_repeats_its_metadata() -> None:
    edge = make_edge(model=hermes_model())
    async with edge.client() as client:
        body = {"input": "Hi", "metadata": {"a": [1e300, "é"]}}
        reply = await client.post(RESPONSES, json=body)
    assert reply.json()["metadata"] == body["metadata"]


@pytest.mark.parametrize("name", ["1" * 5000, "0" * 20 + "1", "12345678901", "٣"])
async def test_a_bias_of_no_token_id(name: str) -> None:
    status, text = await answered("/v1/completions", {"prompt": "Hi", "logit_bias": {name: 1}})
    assert status == 400
    assert text.startswith(f"logit_bias names token {name[:20]!r}")
