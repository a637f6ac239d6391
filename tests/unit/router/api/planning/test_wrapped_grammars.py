"""A schema within a larger grammar is refused as it is alone: with its field, place and depth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammars.bounds import MAX_DEPTH
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import NOW, WEATHER, hermes_model

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
GOOD: dict[str, Any] = {"type": "object", "properties": {"a": {"items": {"type": "integer"}}}}
BAD: dict[str, Any] = {"type": "object", "properties": {"a": {"items": {"not": {}}}}}
REMOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"items": {"$ref": "https://example.org/a"}}},
}
PLACE = "#/properties/a/items: "
TOOLS: dict[str, Any] = {"tools": [WEATHER, NOW]}
THINK: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}


def tool(parameters: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "f", "parameters": parameters, "strict": strict},
    }


def form(schema: Any) -> dict[str, Any]:
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": described}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


async def reply_to(body: dict[str, Any], path: str = CHAT) -> tuple[int, Any]:
    edge = make_edge(says("x"), model=hermes_model())
    async with edge.client() as client:
        reply = await client.post(path, json=body)
    assert (reply.status_code == 200) == bool(edge.generator.calls)
    return reply.status_code, reply.json()


FORM = "response_format.json_schema.schema"
FIELD = "tools.1.function.parameters"
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a strict tool": ({"tools": [NOW, tool(BAD, strict=True)]}, FIELD, PLACE),
    "a strict tool that must be called": (
        {"tools": [NOW, tool(BAD, strict=True)], "tool_choice": "required"},
        FIELD,
        PLACE,
    ),
    "a strict tool of another document": (
        {"tools": [NOW, tool(REMOTE, strict=True)]},
        FIELD,
        PLACE,
    ),
    "a good format beside a bad tool": (
        {"tools": [NOW, tool(BAD, strict=True)]} | form(GOOD),
        FIELD,
        PLACE,
    ),
    "a format beside tools": (TOOLS | form(BAD), FORM, PLACE),
    "a format beside a tool with what it may leave out": (
        {"tools": [tool(BAD, strict=False)]} | form(BAD),
        FORM,
        PLACE,
    ),
    "a schema as text beside tools": (
        TOOLS | {"guided_json": json.dumps(BAD)},
        "guided_json",
        PLACE,
    ),
    "a pattern beside tools": (
        TOOLS | {"guided_regex": "(?<=a)b"},
        "guided_regex",
        "regular expression cannot be followed: ",
    ),
    "a format behind thinking": (THINK | form(BAD), FORM, PLACE),
    "a pattern behind thinking": (THINK | {"guided_regex": "(?<=a)b"}, "guided_regex", "regular"),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_part_at_fault_is_named(case: str) -> None:
    fields, param, words = CASES[case]
    status, answer = await reply_to(ASKED | fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


async def test_a_tool_is_named_in_the_message() -> None:
    _, answer = await reply_to(ASKED | {"tools": [NOW, tool(BAD, strict=True)]})
    assert answer["error"]["message"].startswith(
        f'the JSON schema of {FIELD} cannot be followed: {PLACE}Unimplemented keys: ["not"]'
    )


async def test_tools_that_may_not_be_called_are_not_enforced() -> None:
    only_now = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "now"}}],
        },
    }
    status, _ = await reply_to(
        ASKED | {"tools": [NOW, tool(BAD, strict=True)], "tool_choice": only_now}
    )
    assert status == 200


async def test_what_a_tool_may_leave_out_is_left_out() -> None:
    status, _ = await reply_to(ASKED | {"tools": [NOW, tool(BAD, strict=False)]} | form(GOOD))
    assert status == 200


@pytest.mark.parametrize("beside", [{}, TOOLS, THINK], ids=["alone", "tools", "thinking"])
@pytest.mark.parametrize("as_text", [False, True])
async def test_the_depth_of_a_schema_is_bounded(beside: dict[str, Any], as_text: bool) -> None:
    for levels in (MAX_DEPTH, MAX_DEPTH + 1, 70, 120, *((900, 5000) if as_text else ())):
        schema = '{"items":' * (levels - 1) + "{}" + "}" * (levels - 1)
        fields = {"guided_json": schema} if as_text else form(deep(levels))
        status, answer = await reply_to(ASKED | beside | fields)
        assert status == (200 if levels <= MAX_DEPTH else 400), levels
        if status == 400:
            assert answer["error"]["param"] == ("guided_json" if as_text else FORM)
            assert str(MAX_DEPTH) in answer["error"]["message"] or levels == 5000


async def test_the_field_is_named_in_the_words_of_the_api() -> None:
    format_ = {"type": "json_schema", "name": "x", "schema": BAD}
    status, answer = await reply_to({"input": "Hi", "text": {"format": format_}}, "/v1/responses")
    assert (status, answer["error"]["param"][:11]) == (400, "text.format")
    assert PLACE in answer["error"]["message"]
