"""What operators say about chats, and what a chat template says by itself: tools and thinking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from router.text.chat.conversation import MAX_TEMPLATE_BYTES, ChatSettings
from router.tools.formats import HERMES, LLAMA_JSON, format_of
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import (
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
    WEATHER,
    hermes_model,
    model_with,
)

PARIS = '{"city": "Paris"}'
QUESTION: dict[str, Any] = {"role": "user", "content": "Weather in Paris?"}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": PARIS},
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
THOUGHT = "<think>hm</think>Hi"


async def ask(edge: Edge, *messages: dict[str, Any], status: int = 200, **fields: Any) -> Any:
    async with edge.client() as client:
        body = {"messages": messages, **fields}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    return response.json()


async def message_of(edge: Edge, **fields: Any) -> dict[str, Any]:
    (choice,) = (await ask(edge, QUESTION, **fields))["choices"]
    message: dict[str, Any] = choice["message"]
    return message


def prompt_of(edge: Edge) -> str:
    (call,) = edge.generator.calls
    return edge.model.decode(call.prompt_token_ids, with_special_tokens=True)


# --- the format of a Llama template ---------------------------------------------------------------


def turn(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"


async def test_a_llama_template_says_how_calls_are_written() -> None:
    assert format_of(LLAMA_TEMPLATE) is LLAMA_JSON
    said = LLAMA_JSON.call_text("get_weather", PARIS)
    edge = make_edge(says(said), model=model_with(LLAMA_TEMPLATE))
    message = await message_of(edge, tools=[WEATHER])
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": PARIS}


async def test_a_llama_template_renders_tools_a_call_and_its_result() -> None:
    edge = make_edge(says("It is sunny."), model=model_with(LLAMA_TEMPLATE))
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    await ask(edge, QUESTION, called, RESULT, tools=[WEATHER])
    prompt = prompt_of(edge)
    assert prompt.startswith(turn("system", "Environment: ipython\nBe brief."))
    assert '    "function": {\n        "name": "get_weather"' in prompt
    wanted = turn("assistant", '{"name": "get_weather", "parameters": {"city": "Paris"}}')
    wanted += turn("ipython", "sunny") + turn("assistant", "").removesuffix("<|eot_id|>")
    assert prompt.endswith("Weather in Paris?<|eot_id|>" + wanted)


async def test_a_llama_template_refuses_two_calls_in_a_turn() -> None:
    edge = make_edge(says("x"), model=model_with(LLAMA_TEMPLATE))
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "call_2"}]}
    results = RESULT, RESULT | {"tool_call_id": "call_2"}
    answer = await ask(edge, QUESTION, called, *results, tools=[WEATHER], status=400)
    assert "one call at a time" in answer["error"]["message"]


# --- --tool-template FILE -------------------------------------------------------------------------


async def test_a_tool_template_is_for_requests_with_tools_alone(tmp_path: Path) -> None:
    (tmp_path / "tools.jinja").write_text(HERMES_TEMPLATE)
    chat = ChatSettings(tool_template=str(tmp_path / "tools.jinja"))
    edge = make_edge(
        says(HERMES.call_text("get_weather", PARIS)), model=model_with(None, chat=chat)
    )
    (call,) = (await message_of(edge, tools=[WEATHER]))["tool_calls"]
    assert call["function"]["arguments"] == PARIS
    assert "# Tools" in prompt_of(edge)
    plain = make_edge(says("Hi"), model=model_with("plain {{ messages[0].content }}", chat=chat))
    await message_of(plain)
    assert prompt_of(plain) == "plain Weather in Paris?"


def test_a_tool_template_has_a_most_size(tmp_path: Path) -> None:
    path = tmp_path / "tools.jinja"
    chat = ChatSettings(tool_template=str(path))
    path.write_text("{# " + "x" * (MAX_TEMPLATE_BYTES - 6) + " #}")
    model_with(None, chat=chat)
    for too_long in ("x" * (MAX_TEMPLATE_BYTES - 5), " " + "ü" * (MAX_TEMPLATE_BYTES // 2)):
        path.write_text("{# " + too_long + " #}", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"more than 1048576 bytes"):
            model_with(None, chat=chat)


def test_a_tool_template_without_an_end_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match=r"more than 1048576 bytes"):
        model_with(None, chat=ChatSettings(tool_template="/dev/zero"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: .*No such file"),
        (b"\xff{{ messages }}", "cannot be read: .*utf-8"),
        (b"{% if tools %}", "does not compile"),
    ],
)
def test_a_tool_template_that_cannot_be_used_is_named(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "tools.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"tool_template is '.*tools\.jinja': .*{words}"):
        model_with(None, chat=ChatSettings(tool_template=str(path)))


# --- --reasoning-format ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reasoning_format", "thought", "text"),
    [("think", "hm", "Hi"), ("auto", None, THOUGHT), ("none", None, THOUGHT)],
)
async def test_a_template_that_does_not_speak_of_thinking(
    reasoning_format: str, thought: str | None, text: str
) -> None:
    model = model_with(None, chat=ChatSettings(reasoning_format=reasoning_format))
    message = await message_of(make_edge(says(THOUGHT), model=model))
    assert (message.get("reasoning_content"), message["content"]) == (thought, text)


async def test_without_a_reasoning_format_thinking_is_text() -> None:
    fields = {
        "chat_template_kwargs": {"enable_thinking": True},
        "response_format": {"type": "json_object"},
    }
    model = model_with(HERMES_TEMPLATE, chat=ChatSettings(reasoning_format="none"))
    plain, thinking = (
        make_edge(says("hm</think>{}"), model=one) for one in (model, hermes_model())
    )
    message = await message_of(plain, **fields)
    assert (message.get("reasoning_content"), message["content"]) == (None, "hm</think>{}")
    message = await message_of(thinking, **fields)
    assert (message["reasoning_content"], message["content"]) == ("hm", "{}")
    (call,) = plain.generator.calls
    assert call.sampling.grammar is not None
    assert "thought" not in call.sampling.grammar.text
