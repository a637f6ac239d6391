"""What an assistant thought earlier goes to the template, by either name, in every API."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.bodies.chat_messages import template_messages
from router.api.bodies.schemas import ChatBody, parse_fields
from router.api.bodies.unknown_fields import LeftOut
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import hermes_model


@pytest.mark.covers("J09")
@pytest.mark.parametrize(
    ("given", "thought"),
    [
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "b"}, "b"),
        ({"reasoning": "b", "reasoning_content": "a"}, "a"),
        ({"reasoning": None}, None),
        ({}, None),
    ],
)
def test_reasoning_of_the_history(given: dict[str, Any], thought: str | None) -> None:
    message = {"role": "assistant", "content": "yes", **given}
    messages = parse_fields(ChatBody, {"messages": [message]}).messages
    (plain,) = template_messages(messages, LeftOut())
    assert plain.get("reasoning_content") == thought


USER: dict[str, Any] = {"role": "user", "content": "Hi"}
SAID: dict[str, Any] = {"role": "assistant", "content": "yes"}
ITEM: dict[str, Any] = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "c"}]}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
BLOCK: dict[str, Any] = {"type": "thinking", "thinking": "c", "signature": ""}
TEXT: dict[str, Any] = {"type": "text", "text": "yes"}
HIDDEN: dict[str, Any] = {"type": "redacted_thinking", "data": "xyz"}
BOTH = {"reasoning": "b", "reasoning_content": "a"}


async def prompt_of(path: str, body: dict[str, Any]) -> str:
    edge = make_edge(says("x"), model=hermes_model())
    async with edge.client() as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return edge.model.decode(edge.generator.calls[0].prompt_token_ids, with_special_tokens=True)


@pytest.mark.covers("J09")
@pytest.mark.parametrize(
    ("items", "wanted"),
    [
        ([SAID | {"reasoning": "b"}], "<think>b</think>yes"),
        ([SAID | {"reasoning_content": "a"}], "<think>a</think>yes"),
        ([SAID | BOTH], "<think>a</think>yes"),
        ([SAID | {"reasoning_content": None, "reasoning": "b"}], "<think>b</think>yes"),
        ([ITEM, SAID | BOTH], "<think>c</think>yes"),
        ([CALL | {"reasoning": "b"}, CALL | BOTH], "<think>b</think><tool_call>"),
        ([SAID | {"reasoning": "b"}, CALL | {"reasoning": "d"}], "<think>b</think>yes"),
    ],
)
async def test_reasoning_of_items(items: list[dict[str, Any]], wanted: str) -> None:
    prompt = await prompt_of("/v1/responses", {"input": [USER, *items, USER]})
    assert f"assistant\n{wanted}" in prompt
    assert prompt.count("<think>") == 1


@pytest.mark.covers("J09")
@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (SAID | {"reasoning": "b"}, "<think>b</think>yes"),
        (SAID | {"content": [TEXT], "reasoning_content": "a"}, "<think>a</think>yes"),
        (SAID | {"content": [TEXT]} | BOTH, "<think>a</think>yes"),
        (SAID | {"content": [BLOCK, TEXT], "reasoning": "b"}, "<think>c</think>yes"),
        (SAID | {"content": [BLOCK, HIDDEN, BLOCK, TEXT]}, "<think>cc</think>yes"),
        (SAID | {"content": [HIDDEN, TEXT]}, "yes"),
        (SAID | {"content": [{"type": "thinking"}, TEXT]}, "yes"),
    ],
)
async def test_reasoning_of_messages(said: dict[str, Any], wanted: str) -> None:
    prompt = await prompt_of("/v1/messages", {"max_tokens": 9, "messages": [USER, said, USER]})
    assert f"assistant\n{wanted}<|im_end|>" in prompt
