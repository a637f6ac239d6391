"""OpenAI's `/v1/responses`, in the shape that its own client reads."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent, ResponseStreamEvent
from pydantic import TypeAdapter

from common.errors import InvalidRequest, NodeLost, Overloaded
from router.tools.formats import HERMES
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import chunks, fails, says
from tests.support.http.tool_models import NOW, hermes_model


async def test_the_usage_has_every_count() -> None:
    edge = make_edge(says("Hello", num_cached=3), model=hermes_model())
    async with edge.client() as client:
        response = await client.post("/v1/responses", json={"input": "Hi"})
    usage = response.json()["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert usage["input_tokens"] == len(edge.generator.calls[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (NodeLost("the node is gone"), "node_lost", "server_error"),
        (Overloaded("no node has a seat"), "overloaded", "server_error"),
        (InvalidRequest("no token can follow"), "invalid_request", "invalid_prompt"),
    ],
)
async def test_a_stream_that_fails_ends_with_the_failed_response(
    error: Exception, code: str, kind: str
) -> None:
    first = chunks(hermes_model().encode("Hello world", add_special_tokens=False, param=""))[:1]
    edge = make_edge(fails(error, first), model=hermes_model())
    transport = httpx2.ASGITransport(app=edge.app)
    async with httpx2.AsyncClient(transport=transport) as http:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="-", http_client=http)
        stream = await client.responses.create(model="tiny", input="Hi", stream=True)
        events = [event async for event in stream]
    declared: TypeAdapter[object] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        declared.validate_python(event.model_dump())
    wrong, failed = events[-2:]
    assert isinstance(wrong, ResponseErrorEvent)
    assert (wrong.code, wrong.message) == (code, str(error))
    assert isinstance(failed, ResponseFailedEvent)
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert (failed.response.error.code, failed.response.error.message) == (kind, str(error))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (item,) = failed.response.output
    assert item.type == "message"
    assert item.status == "incomplete"


@pytest.mark.covers("W05")
@pytest.mark.parametrize("text", [None, {}, {"format": None}, {"verbosity": None}])
async def test_an_answer_always_says_its_format(text: dict[str, object] | None) -> None:
    async with make_edge(says("Hello"), model=hermes_model()).client() as client:
        response = await client.post("/v1/responses", json={"input": "Hi", "text": text})
    assert response.json()["text"]["format"] == {"type": "text"}


@pytest.mark.covers("W05")
async def test_a_verbosity_is_repeated_beside_the_format() -> None:
    asked = {"input": "Hi", "text": {"verbosity": "medium"}}
    async with make_edge(says("Hello"), model=hermes_model()).client() as client:
        response = await client.post("/v1/responses", json=asked)
    assert response.json()["text"] == {"verbosity": "medium", "format": {"type": "text"}}


CALL = HERMES.call_text("now", "{}")
TOOL = {"type": "function", **NOW["function"]}


@pytest.mark.covers("T19")
@pytest.mark.parametrize("said", ["Hello", CALL, f"\nhm</think>I look.\n{CALL}\n{CALL}", CALL[:40]])
@pytest.mark.parametrize("size", [1, 1000])
async def test_items_of_a_stream_are_those_of_its_response_at_the_end(said: str, size: int) -> None:
    body: dict[str, Any] = {"input": "Hi", "tools": [TOOL], "stream": True}
    if "think" in said:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    edge = make_edge(says(said, size=size), model=hermes_model())
    async with edge.client() as client:
        response = await client.post("/v1/responses", json=body)
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    begun = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert begun == [item["id"] for item in done]
    assert len(set(begun)) == len(begun)


@pytest.mark.covers("T23")
@pytest.mark.parametrize("extra", [{}, {"status": None, "id": None}, {"status": "completed"}])
async def test_items_may_have_no_id_and_no_status(extra: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    thought: dict[str, Any] = {"type": "reasoning", "summary": [], "content": None}
    asked = {"role": "user", "content": "When?"}
    items = [asked, thought | extra, call | extra, result | extra]
    edge = make_edge(says("At noon."), model=hermes_model())
    async with edge.client() as client:
        response = await client.post("/v1/responses", json={"input": items, "tools": [TOOL]})
    assert response.status_code == 200, response.text


@pytest.mark.covers("W15")
async def test_what_an_item_leaves_out_may_be_null() -> None:
    """As SDKs write items of earlier answers that they have read into objects."""
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    shell = {"type": "local_shell_call_output", "id": "c2", "output": "ok"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]}
    items: list[dict[str, Any]] = [{"role": "user", "content": "When?"}, said, call, result, shell]
    nulls: list[dict[str, Any]] = [
        {"type": None, "id": None, "status": None},
        {"type": None, "id": None, "status": None, "phase": None},
        {"id": None, "status": None, "namespace": None},
        {"id": None, "status": None},
        {"call_id": None, "status": None},
    ]
    prompts = []
    plain: list[dict[str, Any]] = [{}] * len(items)
    for extra in (plain, nulls):
        written = [one | more for one, more in zip(items, extra, strict=True)]
        edge = make_edge(says("At noon."), model=hermes_model(), strict_fields=True)
        async with edge.client() as client:
            response = await client.post("/v1/responses", json={"input": written, "tools": [TOOL]})
        assert response.status_code == 200, response.text
        prompts.append(edge.generator.calls[0].prompt_token_ids)
    assert prompts[0] == prompts[1]


@pytest.mark.covers("W15")
@pytest.mark.parametrize("extra", [{}, {"type": None}, {"type": "item_reference"}])
async def test_a_reference_to_an_item_may_have_no_type(extra: dict[str, Any]) -> None:
    edge = make_edge(says("Hi"), model=hermes_model())
    items = [{"role": "user", "content": "Hi"}, {"id": "msg_1"} | extra]
    async with edge.client() as client:
        response = await client.post("/v1/responses", json={"input": items})
        alone = await client.post("/v1/responses", json={"input": items[1:]})
    assert response.status_code == 200, response.text
    assert alone.status_code == 400
    assert "input.0.type is a record" in alone.json()["error"]["message"]
