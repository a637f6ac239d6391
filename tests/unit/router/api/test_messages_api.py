"""Anthropic's `/v1/messages`, whole and streamed, with its own shape of errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import NodeLost
from common.request import FinishReason
from router.tools.fenced import FENCED
from router.tools.formats import HERMES
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import chunks, fails, says
from tests.support.http.tool_models import hermes_model, model_with

PATH = "/v1/messages"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Weather in Paris?"}],
}
PARIS = '{"city": "Paris"}'
ONE = HERMES.call_text("get_weather", PARIS)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = ASKED | {"tools": [{"name": "get_weather", "input_schema": SCHEMA}]}


def edge_that_says(text: str, **options: Any) -> Edge:
    return make_edge(says(text, **options), model=hermes_model())


async def post(edge: Edge, body: dict[str, Any], status: int = 200, path: str = PATH) -> Any:
    async with edge.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def streamed(edge: Edge, body: dict[str, Any]) -> list[Any]:
    """The payloads of a stream's events, whose names are their types."""
    async with edge.client() as client:
        response = await client.post(PATH, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    payloads = []
    *parts, end = response.text.split("\n\n")
    assert end == ""
    for part in parts:
        name, data = part.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        payloads.append(payload)
    return payloads


def prompt_of(edge: Edge) -> str:
    return edge.model.decode(edge.generator.calls[-1].prompt_token_ids, with_special_tokens=True)


async def test_a_message() -> None:
    edge = edge_that_says("Hello", num_cached=3)
    answer = await post(edge, ASKED | {"system": [{"type": "text", "text": "Be brief."}]})
    assert answer.pop("id").startswith("msg_")
    num_prompt = len(edge.generator.calls[0].prompt_token_ids)
    usage = answer.pop("usage")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_prompt
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2)
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert prompt_of(edge).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert edge.generator.calls[0].sampling.max_tokens == 100


async def test_a_call_and_its_result() -> None:
    edge = edge_that_says("I look.\n" + ONE)
    answer = await post(edge, TOOLS)
    text, call = answer["content"]
    assert text == {"type": "text", "text": "I look."}
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}}
    assert answer["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": "x", "content": "sunny"}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": [text, call | {"id": "x"}]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    await post(edge, TOOLS | {"messages": history})
    prompt = prompt_of(edge)
    assert f"I look.{ONE}<|im_end|>" in prompt
    assert (
        "<tool_response>sunny</tool_response><|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>"
        in prompt
    )


@pytest.mark.parametrize("size", [1, 1000])
async def test_a_stream(size: int) -> None:
    edge = edge_that_says("\nhm</think>I look.\n" + ONE, size=size)
    payloads = await streamed(edge, TOOLS | {"thinking": {"type": "enabled", "budget_tokens": 99}})
    kinds = [payload["type"] for payload in payloads]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    start = payloads[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    blocks: list[dict[str, Any]] = []
    is_open = False
    for payload in payloads[1:-2]:
        match payload["type"]:
            case "content_block_start":
                assert (payload["index"], is_open) == (len(blocks), False)
                blocks.append(payload["content_block"])
                blocks[-1]["pieces"] = []
                is_open = True
            case "content_block_delta":
                assert payload["index"] == len(blocks) - 1
                kind, piece = payload["delta"].values()
                if kind != "signature_delta":
                    blocks[-1]["pieces"].append(piece)
            case kind:
                assert kind == "content_block_stop"
                is_open = False
    assert not is_open
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert ["".join(block["pieces"]) for block in blocks] == ["hm", "I look.", PARIS]
    assert blocks[2]["input"] == {}
    assert payloads[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    num_tokens = edge.generator.calls[0].num_pushed if size == 1 else None
    assert payloads[-2]["usage"]["output_tokens"] == (
        num_tokens or payloads[-2]["usage"]["output_tokens"]
    )


async def test_a_stop_sequence_is_named() -> None:
    answer = await post(edge_that_says("Hello world"), ASKED | {"stop_sequences": [" wor"]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " wor")
    assert answer["content"] == [{"type": "text", "text": "Hello"}]


DEEP = '{"city": ' + "[" * 2000


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": 1e999}',
        '{"city": -1e999, "a": [1.50]}',
        '{"city": "\\ud83d"}',
        '{"city": ' + "1" * 5000 + "}",
        '{"city": 1, "city": 2}',
        DEEP + "]" * 2000 + "}",
    ],
    ids=lambda text: text[:30],
)
async def test_arguments_are_those_of_the_stream(arguments: str) -> None:
    """Python's numbers and texts do not hold all of JSON: nothing is converted."""
    edge = edge_that_says(HERMES.call_text("get_weather", arguments))
    async with edge.client() as client:
        whole = await client.post(PATH, json=TOOLS)
    assert whole.status_code == 200
    assert f'"input":{arguments}}}' in whole.text
    pieces = [one["delta"] for one in await streamed(edge, TOOLS) if "delta" in one]
    assert "".join(one.get("partial_json", "") for one in pieces) == arguments


@pytest.mark.parametrize("arguments", [DEEP, '{"city": NaN}', '{"city": 1e}', '{"city": "a'])
async def test_arguments_that_are_no_json_are_empty(arguments: str) -> None:
    edge = edge_that_says(f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}')
    answer = await post(edge, TOOLS)
    assert answer["content"][0]["input"] == {}


async def test_an_answer_that_was_cut_off() -> None:
    edge = edge_that_says(ONE[:-25], finish=FinishReason.LENGTH)
    answer = await post(edge, TOOLS)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["input"] == {}


@pytest.mark.parametrize(
    ("choice", "must_call"), [("auto", False), ("any", True), ("none", None), ("tool", True)]
)
async def test_a_choice_of_tools(choice: str, must_call: bool | None) -> None:
    edge = edge_that_says("x")
    await post(edge, TOOLS | {"tool_choice": {"type": choice, "name": "get_weather"}})
    grammar = edge.generator.calls[0].sampling.grammar
    assert (grammar is None) is (must_call is None)
    if grammar is not None:
        assert ("TEXT" in grammar.text) is not must_call


@pytest.mark.covers("T12")
async def test_thinking_can_be_switched_off() -> None:
    edge = edge_that_says("Hello")
    answer = await post(edge, ASKED | {"thinking": {"type": "disabled"}})
    assert answer["content"] == [{"type": "text", "text": "Hello"}]
    assert prompt_of(edge).endswith("<think>\n\n</think>\n\n")


async def test_a_schema_of_the_answer() -> None:
    edge = edge_that_says("{}")
    form = {"type": "json_schema", "schema": SCHEMA}
    await post(edge, ASKED | {"output_config": {"format": form}})
    grammar = edge.generator.calls[0].sampling.grammar
    assert grammar is not None
    assert "city" in grammar.text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role is 'tool'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages.0.content.0.type is 'image'",
    ),
    ({"stop_sequences": [""]}, "stop_sequences holds"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tool_choice": {"type": "x"}}, 'tool_choice.type is "x"'),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"temperature": "hot"}, "temperature"),
]


@pytest.mark.parametrize(("fields", "words"), BAD)
async def test_an_error_is_in_the_shape_of_this_api(fields: dict[str, Any], words: str) -> None:
    error = await post(edge_that_says("x"), ASKED | fields, status=400)
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]


async def test_statuses_have_their_types() -> None:
    edge = edge_that_says("x")
    wrong = await post(edge, ASKED | {"model": "other"}, status=404)
    assert wrong["error"]["type"] == "not_found_error"
    locked = make_edge(says("x"), model=hermes_model(), api_key="sesame")
    wrong = await post(locked, ASKED, status=401)
    assert wrong["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("GET", f"{PATH}/count_tokens", 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
        ("GET", f"{PATH}/batches", 404, "not_found_error"),
    ],
)
async def test_a_method_or_path_that_is_not_served(
    method: str, path: str, status: int, kind: str
) -> None:
    async with edge_that_says("x").client() as client:
        response = await client.request(method, path)
    wrong = response.json()
    assert (response.status_code, wrong["type"], wrong["error"]["type"]) == (status, "error", kind)
    assert wrong["error"]["message"].startswith(f"{method} {path}: ")


async def test_the_key_may_be_in_the_header_of_this_api() -> None:
    edge = make_edge(says("Hello"), model=hermes_model(), api_key="sesame")
    async with edge.client(headers={"x-api-key": "sesame"}) as client:
        assert (await client.post(PATH, json=ASKED)).status_code == 200
    async with edge.client(headers={"x-api-key": "wrong"}) as client:
        assert (await client.post(PATH, json=ASKED)).status_code == 401


async def test_a_stream_that_fails_ends_with_an_error() -> None:
    first = chunks(hermes_model().encode("Hi", add_special_tokens=False, param=""))[:1]
    edge = make_edge(fails(NodeLost("the node is gone"), first), model=hermes_model())
    payloads = await streamed(edge, ASKED)
    assert payloads[-1]["type"] == "error"
    assert payloads[-1]["error"]["type"] == "api_error"


async def test_tools_and_a_template_without_them() -> None:
    said = FENCED.call_text("get_weather", PARIS)
    answer = await post(make_edge(says(said), model=model_with(None)), TOOLS)
    assert answer["content"][0]["input"] == {"city": "Paris"}


@pytest.mark.parametrize("content", ["It is", [{"type": "text", "text": "It is"}]])
async def test_a_text_of_the_assistant_that_is_the_last_message_is_continued(content: Any) -> None:
    edge = edge_that_says(" sunny")
    begun = {"role": "assistant", "content": content}
    answer = await post(edge, ASKED | {"messages": [*ASKED["messages"], begun]})
    assert prompt_of(edge).endswith("<|im_end|>\n<|im_start|>assistant\nIt is")
    assert answer["content"] == [{"type": "text", "text": " sunny"}]


async def test_a_call_that_is_the_last_message_is_not_continued() -> None:
    edge = edge_that_says("Done")
    call = {"type": "tool_use", "id": "x", "name": "get_weather", "input": {"city": "Paris"}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]}
    await post(edge, TOOLS | {"messages": [*ASKED["messages"], said]})
    assert prompt_of(edge).endswith("<|im_end|>\n<|im_start|>assistant\n")


# --- a limit that is more than the context leaves -------------------------------------------------


@pytest.mark.covers("J18")
@pytest.mark.parametrize("limit", [4096, 32_000, 10**30])
async def test_an_answer_of_messages_says_that_the_context_ended_it(limit: int) -> None:
    """Claude Code sends the same limit, 32,000 and more, with every conversation."""
    edge = edge_that_says("Hello", finish=FinishReason.LENGTH)
    answer = await post(edge, ASKED | {"max_tokens": limit})
    (call,) = edge.generator.calls
    assert call.sampling.max_tokens == edge.model.max_model_len - len(call.prompt_token_ids)
    assert call.is_cut_to_fit
    assert answer["stop_reason"] == "model_context_window_exceeded"
    events = await streamed(edge, ASKED | {"max_tokens": limit})
    (end,) = (event for event in events if event["type"] == "message_delta")
    assert end["delta"]["stop_reason"] == "model_context_window_exceeded"
    counted = await post(edge, ASKED | {"max_tokens": limit}, path=f"{PATH}/count_tokens")
    assert counted == {"input_tokens": len(call.prompt_token_ids)}


@pytest.mark.covers("J18")
async def test_a_limit_that_fits_ends_the_answer_as_such() -> None:
    edge = edge_that_says("Hello", finish=FinishReason.LENGTH)
    await post(edge, ASKED)
    num_prompt = len(edge.generator.calls[0].prompt_token_ids)
    for limit in (1, edge.model.max_model_len - num_prompt):
        answer = await post(edge, ASKED | {"max_tokens": limit})
        call = edge.generator.calls[-1]
        assert (call.sampling.max_tokens, call.is_cut_to_fit) == (limit, False)
        assert answer["stop_reason"] == "max_tokens"
