"""Every answer and event has the fields that OpenAI's own types require, in their types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from router.tools.formats import HERMES
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import NOW, hermes_model

CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOL: dict[str, Any] = {"type": "function", **NOW["function"]}
CALL = HERMES.call_text("now", "{}")
THOUGHT = "hm</think>Hello"
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
CASES: list[tuple[str, dict[str, Any], str]] = [
    (CHATS, {}, "Hello"),
    (CHATS, {"logprobs": True, "top_logprobs": 2, "n": 2}, "Hello"),
    (CHATS, {"stop": "lo", "stream_options": {"include_usage": True}}, "Hello"),
    (CHATS, {"tools": [NOW]}, f"I look.\n{CALL}\n{CALL}"),
    (CHATS, {"tools": [NOW], "max_tokens": 9}, CALL[:40]),
    (CHATS, THINKS, THOUGHT),
    (RESPONSES, {"instructions": "Be brief.", "metadata": {"a": "b"}}, "Hello"),
    (RESPONSES, {"tools": [TOOL], "tool_choice": "auto"}, f"I look.\n{CALL}\n{CALL}"),
    (RESPONSES, {"tools": [TOOL], "max_output_tokens": 16}, CALL[:40]),
    (RESPONSES, {"tools": [{"type": "custom", "name": "patch"}]}, "Hello"),
    (RESPONSES, {"text": {"verbosity": "medium"}, **THINKS}, THOUGHT),
]
TYPES: dict[str, tuple[Any, Any]] = {
    CHATS: (ChatCompletion, ChatCompletionChunk),
    RESPONSES: (Response, ResponseStreamEvent),
}


@pytest.mark.covers("T40")
@pytest.mark.parametrize(("path", "fields", "said"), CASES)
async def test_answers_and_events_are_those_of_the_sdk(
    path: str, fields: dict[str, Any], said: str
) -> None:
    edge = make_edge(says(said), model=hermes_model())
    body = {"messages": [USER]} if path == CHATS else {"input": "Hi"}
    whole, event = (TypeAdapter(kind) for kind in TYPES[path])
    async with edge.client() as client:
        answer = await client.post(path, json=body | fields)
        stream = await client.post(path, json=body | fields | {"stream": True})
    whole.validate_json(answer.text)
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if "data: {" in line]
    assert len(lines) > 1
    for line in lines:
        event.validate_json(line)
    if path == RESPONSES:
        numbers = [json.loads(line)["sequence_number"] for line in lines]
        assert numbers == list(range(len(lines)))
