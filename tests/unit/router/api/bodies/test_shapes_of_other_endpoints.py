"""Chats in which clients send what another endpoint has in that place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import Call, says
from tests.support.http.tool_models import hermes_model

PATH = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
NOW: dict[str, Any] = {"name": "now", "description": "The time.", "parameters": {"type": "object"}}
DAY: dict[str, Any] = NOW | {"name": "day"}


async def answered(status: int = 200, **fields: Any) -> tuple[Any, list[Call]]:
    edge = make_edge(says("Hello"), model=hermes_model(), strict_fields=True)
    async with edge.client() as client:
        reply = await client.post(PATH, json={"messages": [USER], "seed": 7} | fields)
    assert reply.status_code == status, reply.text
    return reply.json(), edge.generator.calls


async def asked(**fields: Any) -> tuple[Any, ...]:
    """What nodes are asked: the prompt, and how to draw."""
    _, (call,) = await answered(**fields)
    return call.prompt_token_ids, call.sampling


def nested(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def flat(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", **function}


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.covers("J16")
@pytest.mark.parametrize("choice", [None, "required"])
async def test_functions_may_stand_in_the_tool_itself(choice: str | None) -> None:
    wanted = await asked(tools=[nested(NOW), nested(DAY)], tool_choice=choice)
    assert await asked(tools=[flat(NOW), nested(DAY)], tool_choice=choice) == wanted
    assert await asked(tools=[flat(NOW), flat(DAY)], tool_choice=choice) == wanted


@pytest.mark.covers("J16")
@pytest.mark.parametrize("mode", ["none", "auto", "required"])
async def test_the_mode_of_a_choice_may_be_the_type_of_an_object(mode: str) -> None:
    tools = [nested(NOW)]
    wanted = await asked(tools=tools, tool_choice=mode)
    assert await asked(tools=tools, tool_choice={"type": mode}) == wanted


@pytest.mark.covers("J16")
async def test_a_function_may_be_named_in_the_choice_itself() -> None:
    tools = [nested(NOW), nested(DAY)]
    wanted = await asked(tools=tools, tool_choice=nested({"name": "day"}))
    assert await asked(tools=tools, tool_choice=flat({"name": "day"})) == wanted
    allowed = {"mode": "required", "tools": [nested({"name": "day"})]}
    wanted = await asked(
        tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    allowed |= {"tools": [flat({"name": "day"})]}
    assert wanted == await asked(
        tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )


@pytest.mark.covers("J16")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [flat(NOW | {"name": "a b"})]}, "tools.0.name"),
        ({"tools": [flat(NOW | {"parameters": 5})]}, "tools.0.parameters"),
        ({"tools": [flat(NOW | {"strict": "yes"})]}, "tools.0.strict"),
        ({"tools": [flat(NOW | {"description": 5})]}, "tools.0.description"),
        ({"tools": [{"type": "function", "function": None, "name": "now"}]}, "tools.0.function"),
        ({"tools": [flat(NOW), flat(NOW)]}, "tools.1.name"),
        ({"tools": [flat(NOW), nested(NOW)]}, "tools.1.function.name"),
        ({"tools": [flat(NOW)], "tool_choice": flat({"name": "day"})}, "tool_choice"),
        ({"tools": [flat(NOW)], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ],
)
async def test_what_is_wrong_in_them_is_named_in_its_place(
    fields: dict[str, Any], param: str
) -> None:
    answer, calls = await answered(400, **fields)
    assert (answer["error"]["param"], calls) == (param, [])


CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "format": {"type": "text"}}


@pytest.mark.covers("J16")
@pytest.mark.parametrize("other", [CUSTOM, {"type": "custom", "custom": {"name": "patch"}}])
async def test_tools_of_other_kinds_are_left_out_beside_functions(
    other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    edge = make_edge(says("Hello"), model=hermes_model())
    async with edge.client() as client:
        for tools in ([other, flat(NOW)], [flat(NOW), other], [flat(NOW)]):
            body = {"messages": [USER], "seed": 7, "tools": tools}
            assert (await client.post(PATH, json=body)).status_code == 200
        wrong = {"messages": [USER], "tools": [other, flat(NOW | {"name": 5})]}
        error = (await client.post(PATH, json=wrong)).json()["error"]
        alone = (await client.post(PATH, json={"messages": [USER], "tools": [other]})).json()
    first, second, third = ((one.prompt_token_ids, one.sampling) for one in edge.generator.calls)
    assert first == second == third
    assert (error["param"], alone["error"]["param"]) == ("tools.1.name", "tools.0.type")
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert ["tools of the type 'custom'" in text for text in warned] == [True]
    strict, _ = await answered(400, tools=[flat(NOW), other])
    assert "'custom'" in strict["error"]["message"]


# --- parts of messages ----------------------------------------------------------------------------


@pytest.mark.covers("J17")
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("kind", ["input_text", "output_text", "alone"])
async def test_text_has_the_names_that_other_endpoints_give_it(role: str, kind: str) -> None:
    text: Any = "Hello world" if kind == "alone" else {"type": kind, "text": "Hello world"}
    plain = {"role": role, "content": [{"type": "text", "text": "Hello world"}]}
    wanted = await asked(messages=[plain, USER])
    assert await asked(messages=[plain | {"content": [text]}, USER]) == wanted


@pytest.mark.covers("J17")
async def test_what_the_assistant_thought_may_be_parts_of_its_message() -> None:
    text = {"type": "text", "text": "It is noon."}
    thoughts = [{"type": "thinking", "thinking": one} for one in ("I look", " at a clock.")]
    hidden = {"type": "redacted_thinking", "data": "x"}
    said: dict[str, Any] = {"role": "assistant", "content": "It is noon."}
    wanted = await asked(messages=[USER, said | {"reasoning_content": "I look at a clock."}, USER])
    parts = said | {"content": [*thoughts, hidden, text]}
    assert await asked(messages=[USER, parts, USER]) == wanted
    other = parts | {"reasoning_content": "I look at a clock.", "content": [*thoughts[:1], text]}
    assert await asked(messages=[USER, other, USER]) == wanted
    assert await asked(messages=[USER, said | {"content": [hidden, text]}, USER]) == await asked(
        messages=[USER, said, USER]
    )


@pytest.mark.covers("J17")
@pytest.mark.parametrize(
    ("role", "part", "param"),
    [
        ("user", {"type": "thinking", "thinking": "hm"}, "messages.0.content.0.type"),
        ("user", {"type": "input_text", "text": None}, "messages.0.content.0.text"),
        ("user", {"type": "input_image", "image_url": "x"}, "messages.0.content.0.type"),
        ("assistant", {"type": "thinking", "thinking": 5}, "messages.0.content.0.thinking"),
        ("assistant", {"type": "thinking"}, "messages.0.content.0.thinking"),
    ],
)
async def test_other_parts_are_refused_in_their_place(
    role: str, part: dict[str, Any], param: str
) -> None:
    answer, calls = await answered(400, messages=[{"role": role, "content": [part]}, USER])
    assert (answer["error"]["param"], calls) == (param, [])


# --- the conversation -----------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CHAT_SHAPE: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ],
    "tools": [nested(NOW)],
    "max_tokens": 9,
}
RESPONSE_SHAPE: dict[str, Any] = {
    "input": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ],
    "tools": [flat(NOW)],
    "max_output_tokens": 9,
}


async def sent(body: dict[str, Any], says_what: str = "Hello") -> tuple[Any, Call]:
    edge = make_edge(says(says_what), model=hermes_model(), strict_fields=True)
    async with edge.client() as client:
        reply = await client.post(PATH, json=body | {"seed": 7})
    assert reply.status_code == 200, reply.text
    (call,) = edge.generator.calls
    return reply, call


@pytest.mark.covers("J23")
async def test_a_chat_in_the_shape_of_a_response_is_answered_as_a_chat() -> None:
    said = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    wanted, by_chat = await sent(CHAT_SHAPE, said)
    found, call = await sent(RESPONSE_SHAPE, said)
    assert (call.prompt_token_ids, call.sampling) == (by_chat.prompt_token_ids, by_chat.sampling)
    (choice,) = found.json()["choices"]
    assert found.json()["object"] == "chat.completion"
    assert [one["function"] for one in choice["message"]["tool_calls"]] == [
        one["function"] for one in wanted.json()["choices"][0]["message"]["tool_calls"]
    ]


ALLOWED = {"mode": "required", "tools": [nested({"name": "day"})]}


@pytest.mark.covers("J16", "J23")
@pytest.mark.parametrize(
    ("choice", "in_a_chat"),
    [
        ("auto", "auto"),
        (nested({"name": "day"}), nested({"name": "day"})),
        ({"type": "allowed_tools", **ALLOWED}, {"type": "allowed_tools", "allowed_tools": ALLOWED}),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED},) * 2,
    ],
)
async def test_its_tools_and_choices_may_have_the_shape_of_a_chat(
    choice: Any, in_a_chat: Any
) -> None:
    tools = [nested(NOW), nested(DAY)]
    _, wanted = await sent(CHAT_SHAPE | {"tools": tools, "tool_choice": in_a_chat})
    for mixed in (tools, [nested(NOW), flat(DAY)]):
        _, found = await sent(RESPONSE_SHAPE | {"tools": mixed, "tool_choice": choice})
        assert (found.prompt_token_ids, found.sampling) == (
            wanted.prompt_token_ids,
            wanted.sampling,
        )


@pytest.mark.covers("J16", "J23")
async def test_a_custom_tool_may_have_the_shape_of_a_chat_too() -> None:
    custom: dict[str, Any] = {"name": "patch", "description": "Patch a file."}
    edge = make_edge(says("Hello"), model=hermes_model())
    async with edge.client() as client:
        for tool in ({"type": "custom", **custom}, {"type": "custom", "custom": custom}):
            body = {"input": "Hi", "seed": 7, "tools": [tool]}
            reply = await client.post("/v1/responses", json=body)
            assert reply.status_code == 200, reply.text
    first, second = ((one.prompt_token_ids, one.sampling) for one in edge.generator.calls)
    assert first == second


@pytest.mark.covers("J23")
async def test_its_stream_is_that_of_a_chat_with_the_usage_that_was_asked_for() -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    found, _ = await sent(RESPONSE_SHAPE | stream)
    events = [line[6:] for line in found.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    objects = [json.loads(event) for event in events[:-1]]
    assert {one["object"] for one in objects} == {"chat.completion.chunk"}
    assert objects[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.covers("J23")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None, "input": [{"type": "message", "role": "x"}]}, "input.0.role"),
        ({"messages": None, "input": "Hi", "max_output_tokens": "9"}, "max_output_tokens"),
        (
            {"messages": None, "input": "Hi", "tools": [nested(NOW | {"name": "a b"})]},
            "tools.0.function.name",
        ),
        ({"messages": None, "input": "Hi", "tools": [flat(NOW | {"name": 5})]}, "tools.0.name"),
        ({"messages": None}, "messages"),
        ({"messages": 5, "input": "Hi"}, "messages"),
        ({"messages": [], "input": "Hi"}, "messages"),
    ],
)
async def test_what_is_wrong_in_it_is_named_where_it_is(fields: dict[str, Any], param: str) -> None:
    answer, _ = await answered(400, **fields)
    assert param in (answer["error"]["param"] or answer["error"]["message"])


@pytest.mark.covers("J23")
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["a", "b"]},
        {"logit_bias": {"5": 2}},
        {"n": 2},
        {"logprobs": True},
        {"stop_token_ids": [5]},
        {"skip_special_tokens": False},
        {"max_completion_tokens": 5},
        {"reasoning_effort": "high"},
        {"n": None, "response_format": None},
    ],
    ids=json.dumps,
)
async def test_it_has_the_fields_of_chats_too(fields: dict[str, Any]) -> None:
    def without_limit(body: dict[str, Any]) -> dict[str, Any]:
        limits = ("max_tokens", "max_output_tokens") if "max_completion_tokens" in fields else ()
        return {name: value for name, value in body.items() if name not in (*limits, "tools")}

    wanted, wanted_calls = await answered(**without_limit(CHAT_SHAPE), **fields)
    shape = {**without_limit(RESPONSE_SHAPE), "messages": None}
    found, calls = await answered(**shape, **fields)
    assert [one.sampling for one in calls] == [one.sampling for one in wanted_calls]
    assert found["choices"] == wanted["choices"]


@pytest.mark.covers("J23")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "x"}}, "response_format.type"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"functions": [1]}, "functions"),
        ({"n": 1000}, "n"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
    ],
    ids=json.dumps,
)
async def test_its_fields_are_named_as_they_were_sent(fields: dict[str, Any], param: str) -> None:
    answer, _ = await answered(400, messages=None, input="Hi", **fields)
    assert answer["error"]["param"] == param


@pytest.mark.covers("J23")
async def test_its_own_field_of_a_chat_counts_before_that_of_the_shape() -> None:
    form = {"type": "json_object"}
    text = {"format": {"type": "text"}}
    _, (call,) = await answered(messages=None, input="Hi", response_format=form, text=text)
    assert call.sampling.grammar is not None
