"""Conversations and words that are wrong deep inside: status 400 with the field, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http.http_edge import make_edge
from tests.support.http.tool_models import hermes_model

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


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
        (RESPONSES, response(nested(65)), "input.0.arguments has more"),
        (MESSAGES, message(nested(65)), "messages.0.content.0.input has more"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": ["a", 5]}]},
            'messages.0.content.1 is not a content part: wanted text or {"type": "text", "text":',
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": ["a"]}]},
            'input.0.content.0 is not a content part: wanted {"type": "input_text", "text": …}',
        ),
        (
            MESSAGES,
            {"max_tokens": 9, "messages": [{"role": "user", "content": ["a"]}]},
            'messages.0.content.0 is not a content block: wanted {"type": "text", "text": …}',
        ),
        (
            MESSAGES,
            {"max_tokens": 9, "system": ["a"], "messages": [{"role": "user", "content": "a"}]},
            'system.0 is not a content block: wanted {"type": "text", "text": …}',
        ),
    ],
)
async def test_arguments_of_a_call(path: str, body: dict[str, Any], field: str) -> None:
    status, text = await answered(path, body)
    assert status == 400, text
    assert text.startswith(field)


USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CUSTOM: dict[str, Any] = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x"}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "content": [{"text": "hm"}]}
SAID = {"role": "assistant", "content": "Hm"}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "1", "output": "sunny"}
TEXT: dict[str, Any] = {"type": "text", "text": "Hi"}
NO_TEXT: dict[str, Any] = {"type": "text", "text": 5}


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (USER | {"role": "robot"}, "role"),
        (USER | {"content": 5}, "content"),
        (USER | {"content": [TEXT, NO_TEXT]}, "content.1.text"),
        (SAID | {"content": 5}, "content"),
        (SAID | {"content": [TEXT, {"type": "refusal", "refusal": 5}]}, "content.1.refusal"),
        (CALL | {"arguments": 5}, "arguments"),
        (CALL | {"name": None}, "name"),
        (CALL | {"call_id": 5}, "call_id"),
        ({"type": 5}, "type"),
        (CUSTOM | {"input": 5}, "input"),
        (CUSTOM | {"name": None}, "name"),
        (CUSTOM | {"call_id": 5}, "call_id"),
        ({"type": "local_shell_call", "call_id": "1", "action": 5}, "arguments"),
        ({"type": "additional_tools"}, "tools"),
        ({"type": "tool_search_output", "tools": [5]}, "tools.0.type"),
        (
            {"type": "custom_tool_call_output", "call_id": "1", "output": [TEXT, 5]},
            "output.1",
        ),
        (RESULT | {"output": ["a", TEXT]}, "output.0"),
        (RESULT | {"output": [TEXT, NO_TEXT]}, "output.1.text"),
        (RESULT | {"call_id": 5}, "call_id"),
    ],
)
@pytest.mark.parametrize("instructions", [None, "Be brief."])
@pytest.mark.parametrize("before", [[], [USER], [USER, CALL, CALL], [USER, THOUGHT]])
async def test_the_item_of_a_response_is_named(
    before: list[Any], instructions: str | None, item: Any, field: str
) -> None:
    body = {"input": [*before, item, CALL, RESULT, USER], "instructions": instructions}
    status, text = await answered(RESPONSES, body)
    assert status == 400
    assert text.startswith(f"input.{len(before)}.{field}"), text


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (CALL | {"reasoning_content": 5}, "reasoning_content"),
        (SAID | {"reasoning": 5}, "reasoning"),
    ],
)
@pytest.mark.parametrize("instructions", [None, "Be brief."])
@pytest.mark.parametrize("before", [[], [USER], [USER, CALL, CALL]])
async def test_a_thought_of_an_item_is_named(
    before: list[Any], instructions: str | None, item: Any, field: str
) -> None:
    body = {"input": [*before, item, CALL, RESULT, USER], "instructions": instructions}
    status, text = await answered(RESPONSES, body)
    assert status == 400
    assert text.startswith(f"input.{len(before)}.{field}"), text


def asked(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def used(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


USE: dict[str, Any] = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
GOT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "1", "content": "sunny"}
THINKS = {"type": "thinking", "thinking": "hm"}
SEARCHED: dict[str, Any] = {
    "type": "search_result",
    "source": "https://example.com",
    "title": "Weather",
    "content": [TEXT],
}


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (USER | {"content": 5}, "content"),
        (USER | {"content": None}, "content"),
        (asked(TEXT, NO_TEXT), "content.1.text"),
        (asked(TEXT, GOT, NO_TEXT), "content.2.text"),
        (asked(TEXT, GOT, GOT | {"content": [TEXT, 5]}), "content.2.content.1"),
        (asked(GOT | {"content": [TEXT, NO_TEXT]}), "content.0.content.1.text"),
        (asked(GOT | {"tool_use_id": 5}), "content.0.tool_use_id"),
        (used(THINKS, TEXT, USE, NO_TEXT), "content.3.text"),
        (used(THINKS, USE, USE | {"input": [5]}), "content.2.input"),
        (used(TEXT, USE | {"name": None}), "content.1.name"),
        (used(TEXT, {"type": "thinking", "thinking": 5}), "content.1.thinking"),
        (SAID | {"reasoning": 5}, "reasoning"),
        (asked(SEARCHED | {"title": None}), "content.0.title"),
        (asked(SEARCHED | {"content": [TEXT, NO_TEXT]}), "content.0.content.1.text"),
        (asked(SEARCHED | {"content": "Hi"}), "content.0.content"),
        (asked(GOT | {"content": [SEARCHED | {"source": 5}]}), "content.0.content.0.source"),
        (asked(GOT | {"content": [{"type": "tool_reference"}]}), "content.0.content.0.tool_name"),
        ({"role": "system", "content": [TEXT, NO_TEXT]}, "content.1.text"),
        ({"role": "system", "content": 5}, "content"),
        (used(TEXT, USE | {"id": 5}), "content.1.id"),
    ],
)
@pytest.mark.parametrize("system", [None, "Be brief.", [TEXT]])
@pytest.mark.parametrize("before", [[], [USER, used(TEXT, USE, USE), asked(GOT, GOT, TEXT)]])
async def test_the_block_of_a_message_is_named(
    before: list[Any], system: Any, said: Any, field: str
) -> None:
    body = {"max_tokens": 9, "system": system, "messages": [*before, said, USER]}
    status, text = await answered(MESSAGES, body)
    assert status == 400
    assert text.startswith(f"messages.{len(before)}.{field}"), text


CUSTOM_TOOL: dict[str, Any] = {"kind": "custom", "name": "f"}


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (RESPONSES, {"input": []}, "input is empty"),
        (RESPONSES, {"tools": [{"name": "a b"}]}, "tools.0.name"),
        (RESPONSES, {"tools": [{"name": "f"}, {"name": "f"}]}, "tools names the function"),
        (RESPONSES, {"tools": [{"name": "f", "parameters": [1]}]}, "tools.0.parameters"),
        (RESPONSES, {"tools": [{"kind": "custom"}]}, "tools.0.name"),
        (RESPONSES, {"tools": [CUSTOM_TOOL, CUSTOM_TOOL]}, "tools names the function"),
        (RESPONSES, {"tools": [CUSTOM_TOOL | {"format": {"type": "grammar"}}]}, "tools.0.format"),
        (RESPONSES, {"tools": [{"kind": "namespace"}]}, "tools.0.name"),
        (RESPONSES, {"tools": [{"kind": "namespace", "name": "n"}]}, "tools.0.tools"),
        (
            RESPONSES,
            {"tools": [{"kind": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools.0.tools.0.name",
        ),
        (
            RESPONSES,
            {"tools": [{"kind": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]},
            "tools.0.tools.0.type",
        ),
        (RESPONSES, {"tool_choice": {"type": "function"}}, "tool_choice.name"),
        (RESPONSES, {"tool_choice": {"type": "custom"}}, "tool_choice.name"),
        (RESPONSES, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        (
            RESPONSES,
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"name": "f"}, {}],
                }
            },
            "tool_choice.tools.1.name",
        ),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"reasoning": {"effort": 5}}, "reasoning.effort"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": [1]}]}, "tools.0.input_schema"),
        (MESSAGES, {"tools": [{"name": 5}]}, "tools.0.name"),
        (MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (MESSAGES, {"output_config": {"effort": 5}}, "output_config.effort"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema is missing",
        ),
        (MESSAGES, {"system": 5}, "system"),
        (MESSAGES, {"system": [TEXT, NO_TEXT]}, "system.1.text"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences holds"),
    ],
)
async def test_the_field_of_a_translated_request_is_named(
    path: str, fields: dict[str, Any], field: str
) -> None:
    plain: dict[str, Any] = {"input": "Hi"} if path == RESPONSES else {"messages": [USER]}
    if path == RESPONSES:
        for tool in (*fields.get("tools", ()), *(fields.get("tool_choice") or {}).get("tools", ())):
            tool["type"] = tool.pop("kind", tool.get("type", "function"))
    status, text = await answered(path, {"max_tokens": 9, **plain, **fields})
    assert status == 400
    assert text.startswith(field), text


async def test_the_schema_of_a_tool_that_cannot_be_followed_is_named() -> None:
    tool = {"name": "f", "strict": True, "input_schema": {"properties": {"a": {"not": {}}}}}
    body = {"max_tokens": 9, "messages": [USER], "tools": [tool]}
    status, text = await answered(MESSAGES, body)
    assert status == 400
    assert "tools.0.input_schema" in text
    assert "function.parameters" not in text


@pytest.mark.parametrize("arguments", [nested(64), '{"a": "\\ud83d\\ude00"}', "", "{}", None])
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


@pytest.mark.parametrize(("path", "name"), [(CHAT, "messages"), (RESPONSES, "input")])
async def test_a_refusal_of_the_assistant_is_text(path: str, name: str) -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert await answered(path, {name: [USER, said, USER]}) == (200, "")


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
