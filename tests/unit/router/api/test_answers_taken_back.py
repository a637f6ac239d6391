"""What the server answered, whole or streamed, it takes back in the next request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.request import FinishReason
from router.tools.formats import HERMES
from tests.support.examples import everyday
from tests.support.http.http_edge import Edge, events, make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import NOW, WEATHER, hermes_model

STRIDE = everyday(27, of=9)
"""Characters between two cuts of an answer."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

CALL = HERMES.call_text("get_weather", '{"city": "Paris é"}')
NO_ARGUMENTS = HERMES.call_text("now", "{}")
ANSWERS = {
    "nothing": "",
    "a blank": " ",
    "text": "Hello",
    "a call": CALL,
    "text and two calls": f"I look.\n{CALL}\n{NO_ARGUMENTS}",
    "a thought": "\nhm\n</think>\n\n",
    "a thought and text": "\nhm\n</think>\n\nHello",
    "a thought and a call": f"\nhm\n</think>\n\n{CALL}",
    "a custom call": HERMES.call_text("patch", '{"input": "a\\n\\"b\\" é"}'),
    "a call in a namespace": HERMES.call_text("crm.find", "{}"),
}

Body = dict[str, Any]


def cut(text: str) -> list[str]:
    """`text`, and what `max_tokens` may leave of it: in a name, in arguments, in an escape."""
    return [text[:at] for at in range(1, len(text), STRIDE)]


def every_answer() -> list[tuple[str, FinishReason]]:
    whole = [(text, FinishReason.STOP) for text in ANSWERS.values()]
    parts = {part for text in ANSWERS.values() for part in [text, *cut(text)] if part}
    return whole + [(part, FinishReason.LENGTH) for part in sorted(parts)]


def functions() -> list[Body]:
    return [WEATHER, NOW]


FLAT = [{"type": "function", **one["function"]} for one in functions()]
BODIES: dict[str, Body] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "tools": functions()},
    RESPONSES: {
        "input": [{"role": "user", "content": "Hi"}],
        "tools": [
            *FLAT,
            {"type": "custom", "name": "patch"},
            {
                "type": "namespace",
                "name": "crm",
                "tools": [{"type": "function", "name": "find"}],
            },
        ],
    },
    MESSAGES: {
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [
            {"name": one["name"], "input_schema": one["parameters"]}
            for one in (tool["function"] for tool in functions())
        ],
    },
}
THINKS: dict[str, Body] = {
    CHAT: {"chat_template_kwargs": {"enable_thinking": True}, "logprobs": True},
    RESPONSES: {"chat_template_kwargs": {"enable_thinking": True}},
    MESSAGES: {"thinking": {"type": "enabled", "budget_tokens": 50}},
}


async def post(edge: Edge, path: str, body: Body) -> Any:
    async with edge.client() as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, (body, reply.text)
    return reply


async def answered(edge: Edge, path: str, body: Body) -> list[list[Body]]:
    """The parts of the next request that an answer becomes: of the whole one, and of its stream."""
    whole = (await post(edge, path, body)).json()
    text = (await post(edge, path, body | {"stream": True})).text
    if path == CHAT:
        (choice,) = whole["choices"]
        return [[choice["message"]], [message_of_deltas(text)]]
    frames = [json.loads(frame.split("\ndata: ")[1]) for frame in text.split("\n\n")[:-1]]
    if path == RESPONSES:
        done = [one["item"] for one in frames if one["type"] == "response.output_item.done"]
        shown = ("type", "name", "namespace", "arguments", "input", "content", "status")
        alike = [
            [{name: item.get(name) for name in shown} for item in parts]
            for parts in (whole["output"], done)
        ]
        assert alike[0] == alike[1]
        return [whole["output"], done, frames[-1]["response"]["output"]]
    # The whole message is an assistant's message, with more fields.
    return [[whole], [{"role": "assistant", "content": blocks_of(frames)}]]


def message_of_deltas(stream: str) -> Body:
    """A message as clients add it up from deltas: `index` of calls stays in it."""
    message: Body = {"role": "assistant", "content": None, "tool_calls": []}
    for payload in events(stream.encode())[:-1]:
        for choice in payload["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    message["tool_calls"].append(part)
                else:
                    function = message["tool_calls"][-1]["function"]
                    function["arguments"] += part["function"]["arguments"]
    return message


def blocks_of(frames: list[Body]) -> list[Body]:
    """Content blocks; arguments that are cut off are none, as in Anthropic's client."""
    blocks: list[Body] = []
    for frame in frames:
        if frame["type"] == "content_block_start":
            blocks.append({"pieces": "", **frame["content_block"]})
        if frame["type"] == "content_block_delta":
            kind, piece = frame["delta"].values()
            blocks[-1]["signature" if kind == "signature_delta" else "pieces"] += piece
    for block in blocks:
        text = block.pop("pieces")
        if block["type"] != "tool_use":
            block[block["type"]] = text
            continue
        try:
            block["input"] = json.loads(text)
        except ValueError:
            block["input"] = {}
    return blocks


def results_of(path: str, parts: list[Body]) -> list[Body]:
    """What a client sends for the calls in an answer: a result for each."""
    if path == CHAT:
        calls = [call for part in parts for call in part.get("tool_calls") or ()]
        return [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
    if path == RESPONSES:
        return [
            {"type": f"{part['type']}_output", "call_id": part["call_id"], "output": ""}
            for part in parts
            if "call_id" in part
        ]
    used = [block for part in parts for block in part["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": block["id"]} for block in used]
    return [{"role": "user", "content": blocks}] if blocks else []


@pytest.mark.covers("J06")
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_every_answer_is_taken_back(path: str, thinks: bool) -> None:
    edge = make_edge(says(""), model=hermes_model(8192))
    body = BODIES[path] | (THINKS[path] if thinks else {})
    name = "input" if path == RESPONSES else "messages"
    num_taken = 0
    for text, finish in every_answer():
        edge.generator.script = says(text, finish, size=3)
        for parts in await answered(edge, path, body):
            more = results_of(path, parts)
            asked = body | {name: [*body[name], *parts, *more, *body[name]]}
            await post(edge, path, asked)
            last = edge.generator.calls[-1].prompt_token_ids
            prompt = edge.model.decode(last, with_special_tokens=True)
            assert prompt.count("<|im_start|>user\nHi<|im_end|>") == 2, text
            num_results = len(more[0]["content"]) if path == MESSAGES and more else len(more)
            assert prompt.count("<tool_response>") == num_results, text
            num_taken += 1
    assert num_taken > 2 * len(ANSWERS)


@pytest.mark.covers("J06")
@pytest.mark.parametrize(
    ("text", "finish"),
    [("", FinishReason.STOP), *((text, FinishReason.LENGTH) for text in (" ", "Hello", CALL))],
)
async def test_the_text_and_the_tokens_of_a_completion_are_taken_back(
    text: str, finish: FinishReason
) -> None:
    edge = make_edge(says(text, finish), model=hermes_model())
    asked = {"prompt": "Hi", "return_token_ids": True, "logprobs": 1}
    (choice,) = (await post(edge, COMPLETIONS, asked)).json()["choices"]
    await post(edge, COMPLETIONS, {"prompt": "Hi" + choice["text"]})
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    await post(edge, COMPLETIONS, {"prompt": ids})
    assert edge.generator.calls[-1].prompt_token_ids == tuple(ids)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_an_answer_that_was_cut_off_can_be_continued(path: str) -> None:
    edge = make_edge(says(" world"), model=hermes_model())
    body: Body = {"messages": [{"role": "user", "content": "Hi"}]}
    body["messages"].append({"role": "assistant", "content": "Hello"})
    more = {"continue_final_message": True, "add_generation_prompt": False}
    await post(edge, path, body | (more if path == CHAT else {"max_tokens": 9}))
    last = edge.generator.calls[-1].prompt_token_ids
    assert edge.model.decode(last, with_special_tokens=True).endswith("assistant\nHello")


@pytest.mark.covers("J06")
@pytest.mark.parametrize(
    "arguments",
    ["", "{", '{"a": "b', "null", "[]", '"x"', "5", "true", "no JSON", None, "1" * 9999],
)
async def test_arguments_that_are_no_object_are_none(arguments: str | None) -> None:
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    edge = make_edge(says("x"), model=hermes_model(16384))
    said = {"role": "assistant", "content": None, "tool_calls": [called]}
    await post(edge, CHAT, {"messages": [{"role": "user", "content": "Hi"}, said]})
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    await post(edge, RESPONSES, {"input": [{"role": "user", "content": "Hi"}, item]})
    for call in edge.generator.calls:
        prompt = edge.model.decode(call.prompt_token_ids, with_special_tokens=True)
        assert HERMES.call_text("f", "{}") in prompt


@pytest.mark.covers("J06", "J15")
@pytest.mark.parametrize(
    "fields",
    [
        {"content": None},
        {"content": ""},
        {"content": []},
        {"refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"refusal": "No.", "content": None},
        {"tool_calls": None},
        {"tool_calls": []},
        {"reasoning_content": None, "reasoning": None},
    ],
)
async def test_a_message_with_the_fields_of_an_answer_is_taken_back(fields: Body) -> None:
    said = {"role": "assistant", "content": "Hello", **fields}
    edge = make_edge(says("x"), model=hermes_model())
    await post(edge, CHAT, {"messages": [{"role": "user", "content": "Hi"}, said]})
    if "tool_calls" not in fields:
        await post(edge, RESPONSES, {"input": [{"role": "user", "content": "Hi"}, said]})
