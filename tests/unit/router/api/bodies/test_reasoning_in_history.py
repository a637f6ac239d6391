"""What an assistant thought earlier goes to the template, by either name, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.api.bodies.chat_messages import template_messages
from router.api.bodies.schemas import ChatBody, parse_fields
from router.api.bodies.unknown_fields import LeftOut
from router.tools.formats import HERMES
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import NOW, hermes_model


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


THOUGHT = "Zwei und\nzwei: 4 😀?"
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
INCLUDES = {"include": ["file_search_call.results", "reasoning.encrypted_content"]}


async def told(path: str, body: dict[str, Any], said: str) -> tuple[Any, list[Any]]:
    """The whole answer, and the events of the same one."""
    edge = make_edge(says(said), model=hermes_model())
    async with edge.client() as client:
        whole = await client.post(path, json=body)
        streamed = await client.post(path, json=body | {"stream": True})
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text + streamed.text
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    return whole.json(), [json.loads(line) for line in lines]


@pytest.mark.covers("J24")
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
async def test_a_thought_comes_back_from_a_client_that_keeps_its_code_alone(
    content: dict[str, Any],
) -> None:
    """As Codex and the AI SDK do, which send no text of what was thought."""
    call = HERMES.call_text("now", "{}")
    body = {"input": "Two and two?", "tools": [{**NOW["function"], "type": "function"}]}
    answer, events = await told(
        "/v1/responses", body | THINKS | INCLUDES, f"\n{THOUGHT}\n</think>\n\n{call}"
    )
    thought, called = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done[0]["encrypted_content"] == thought["encrypted_content"]
    (added, *_) = [one["item"] for one in events if one["type"] == "response.output_item.added"]
    assert added["encrypted_content"] is None
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "noon"}
    history = [USER, kept | content, called, result]
    prompt = await prompt_of("/v1/responses", body | {"input": history})
    assert f"<think>{THOUGHT}</think><tool_call>" in prompt


@pytest.mark.covers("J24")
async def test_a_code_is_given_where_it_is_asked_for() -> None:
    answer, _ = await told("/v1/responses", {"input": "Hi"} | THINKS, "hm</think>Hello")
    assert "encrypted_content" not in answer["output"][0]
    for include in (None, [], "reasoning.encrypted_content", {"a": 1}, [1, None, "x"]):
        more = {"include": include} | THINKS
        answer, _ = await told("/v1/responses", {"input": "Hi"} | more, "hm</think>Hello")
        assert "encrypted_content" not in answer["output"][0]


@pytest.mark.covers("J24")
@pytest.mark.parametrize(
    "code",
    ["gAAAAABo", "pdserve-thought-", "pdserve-thought-%%", "pdserve-thought-/w==", "é", 5, None],
)
async def test_the_code_of_another_server_is_no_thought(code: Any) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": code}
    prompt = await prompt_of("/v1/responses", {"input": [USER, item, SAID, USER]})
    assert "assistant\nyes" in prompt
    with_text = item | {"content": ITEM["content"]}
    prompt = await prompt_of("/v1/responses", {"input": [USER, with_text, SAID, USER]})
    assert "<think>c</think>yes" in prompt


@pytest.mark.covers("J25")
async def test_a_thinking_block_has_a_signature_as_its_last_delta() -> None:
    """Clients drop a block without one, or with an empty one, from the conversation."""
    body = {"messages": [USER], "max_tokens": 99, "thinking": {"type": "enabled"}}
    answer, events = await told("/v1/messages", body, f"{THOUGHT}</think>Hello")
    thought, text = answer["content"]
    assert thought["signature"]
    assert "signature" not in text
    other, _ = await told("/v1/messages", body, "hm</think>Hello")
    assert other["content"][0]["signature"] not in ("", thought["signature"])
    of_thought = [one for one in events if one.get("index") == 0]
    assert of_thought[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    wanted = {"type": "signature_delta", "signature": thought["signature"]}
    assert [one.get("delta") for one in of_thought[-2:]] == [wanted, None]
    signed = [one for one in events if one.get("delta", {}).get("type") == "signature_delta"]
    assert len(signed) == 1
    said = {"role": "assistant", "content": [thought, text]}
    prompt = await prompt_of("/v1/messages", body | {"messages": [USER, said, USER]})
    assert f"<think>{THOUGHT}</think>Hello" in prompt
