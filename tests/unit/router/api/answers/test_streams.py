"""Streams: the order of events, and errors before and after the first token (F90)."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from common.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    HandoffFailed,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    StaleEpoch,
)
from common.request import FinishReason
from router.core.generation import TokenChunk
from router.http.exchange import Reply
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.http.edge_model import tiny_model
from tests.support.http.http_edge import Edge, events, make_edge
from tests.support.http.scripted_generator import Call, chunks, fails, runs_out_of_time, says
from tests.support.http.tool_models import hermes_model

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "stream": True}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {}}}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


def first_chunk(text: str = "Hello") -> list[TokenChunk]:
    ids = tiny_model().encode(text, add_special_tokens=False, param="text")
    return [TokenChunk(first_index=0, token_ids=ids)]


async def post(edge: Edge, path: str, body: dict[str, Any]) -> httpx.Response:
    async with edge.client() as client:
        return await client.post(path, json=body)


async def streamed(edge: Edge, path: str, body: dict[str, Any]) -> list[Any]:
    response = await post(edge, path, body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(response.content)


@pytest.mark.covers("T30")
async def test_a_chat_stream_event_by_event() -> None:
    *payloads, done = await streamed(make_edge(), CHAT_PATH, CHAT)
    assert done == "[DONE]"
    assert [p["choices"][0]["delta"] for p in payloads] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " world"},
        {},
    ]
    assert [p["choices"][0]["finish_reason"] for p in payloads] == [None, None, None, "stop"]
    assert {p["object"] for p in payloads} == {"chat.completion.chunk"}
    assert len({(p["id"], p["created"], p["model"]) for p in payloads}) == 1
    assert all("usage" not in p for p in payloads)


async def test_a_completion_stream_event_by_event() -> None:
    edge = make_edge(says("Hello world", FinishReason.LENGTH))
    *payloads, done = await streamed(edge, TEXT_PATH, TEXT | {"echo": True})
    assert done == "[DONE]"
    assert [p["choices"][0]["text"] for p in payloads] == ["HiHello", " world", ""]
    assert payloads[-1]["choices"][0]["finish_reason"] == "length"
    assert {p["object"] for p in payloads} == {"text_completion"}


@pytest.mark.covers("T30")
async def test_usage_comes_last_when_asked_for() -> None:
    body = CHAT | {"stream_options": {"include_usage": True}}
    edge = make_edge(says("Hello world", num_cached=4))
    *payloads, last, done = await streamed(edge, CHAT_PATH, body)
    assert done == "[DONE]"
    assert all(p["usage"] is None for p in payloads)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert set(last["usage"]["completion_tokens_details"].values()) == {0}


@pytest.mark.covers("T30")
@pytest.mark.parametrize("has_logprobs", [False, True])
async def test_usage_so_far_comes_with_every_event_when_asked_for(has_logprobs: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = CHAT | {"stream_options": options, "logprobs": has_logprobs}
    *payloads, done = await streamed(make_edge(says("Hello world")), CHAT_PATH, body)
    assert done == "[DONE]"
    assert [p["usage"]["completion_tokens"] for p in payloads] == [1, 1, 2, 3, 3]
    assert len({p["usage"]["prompt_tokens"] for p in payloads}) == 1
    text = "".join(p["choices"][0]["delta"].get("content", "") for p in payloads[:-1])
    assert text == "Hello world"


@pytest.mark.covers("T30")
async def test_usage_of_every_event_alone_asks_for_nothing() -> None:
    body = CHAT | {"stream_options": {"continuous_usage_stats": True}}
    *payloads, _ = await streamed(make_edge(), CHAT_PATH, body)
    assert all("usage" not in p for p in payloads)


async def test_text_that_json_must_escape_survives() -> None:
    text = '"\\\n\n\r\u2028 data: 🙂 漢\x00'
    payloads = await streamed(make_edge(says(text)), TEXT_PATH, TEXT)
    assert "".join(p["choices"][0]["text"] for p in payloads[:-1]) == text


async def test_a_held_back_piece_makes_no_event_but_starts_the_stream() -> None:
    time = StoppedTime()
    edge = make_edge(runs_out_of_time(time, first_chunk("Hello")), clock=time)
    payloads = await streamed(edge, CHAT_PATH, CHAT | {"stop": "Hello world"})
    assert payloads[0]["choices"][0]["delta"]["role"] == "assistant"
    assert payloads[1]["error"]["code"] == "deadline_exceeded"


async def test_logprobs_in_streams() -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 1}
    payloads = await streamed(make_edge(says("Hello world")), CHAT_PATH, body)
    got = [p["choices"][0]["logprobs"] for p in payloads[:-1]]
    assert (got[0], got[3]) == ({"content": [], "refusal": None}, None)
    assert [g["content"][0]["token"] for g in got[1:3]] == ["Hello", " world"]
    payloads = await streamed(make_edge(says("Hello world")), TEXT_PATH, TEXT | {"logprobs": 1})
    got = [p["choices"][0]["logprobs"] for p in payloads[:-1]]
    assert [(g["tokens"], g["text_offset"]) for g in got[:2]] == [
        (["Hello"], [0]),
        ([" world"], [5]),
    ]


@pytest.mark.covers("T07")
@pytest.mark.parametrize("size", [2, 20])
async def test_tokens_that_come_together_have_log_probabilities_of_their_own(size: int) -> None:
    """As they come with drafts, or when a stream was held up."""
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    said = "Hello world over the lazy dog"
    found = [
        [
            entry
            for payload in (await streamed(make_edge(says(said, size=pace)), CHAT_PATH, body))[:-1]
            for entry in (payload["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        for pace in (1, size)
    ]
    assert found[0] == found[1]
    assert len({str(entry["top_logprobs"]) for entry in found[0]}) == len(found[0]) > 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, CHAT | {"logprobs": True}),
        (CHAT_PATH, CHAT | {"logprobs": True, "tools": [TOOL]}),
        (TEXT_PATH, TEXT | {"logprobs": 1}),
    ],
)
async def test_a_stop_string_that_takes_all_of_a_text_leaves_empty_lists(
    path: str, body: dict[str, Any]
) -> None:
    edge = make_edge(says("Hello world"), model=hermes_model())
    body = body | {"stop": "Hello"}
    async with edge.client() as client:
        whole = (await client.post(path, json=body | {"stream": False})).json()["choices"][0]
    payloads = await streamed(edge, path, body)
    parts = [payload["choices"][0]["logprobs"] for payload in payloads[:-1]]
    (logprobs,) = filter(None, parts)
    assert logprobs == whole["logprobs"]
    assert not any(logprobs.values())


async def test_choices_are_interleaved_each_in_order() -> None:
    turn = [asyncio.Event() for _ in range(5)]
    turn[0].set()

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        first = 0 if call.sampling.seed == 5 else 1
        parts = chunks(tiny_model().encode("Hello world", add_special_tokens=False, param="t"))
        for place, part in enumerate(parts):
            await turn[2 * place + first].wait()
            turn[2 * place + first + 1].set()
            yield part

    payloads = await streamed(make_edge(play), TEXT_PATH, TEXT | {"n": 2, "seed": 5})
    texts = [(p["choices"][0]["index"], p["choices"][0]["text"]) for p in payloads[:-1]]
    shown = [(index, text) for index, text in texts if text]
    assert shown == [(0, "Hello"), (1, "Hello"), (0, " world"), (1, " world")]
    reasons = [p["choices"][0]["finish_reason"] for p in payloads[:-1]]
    assert reasons.count("length") == 2


STATUS = [
    (InvalidRequest("no", param="seed"), 400, "invalid_request"),
    (Overloaded("full", retry_after_s=2.5), 503, "overloaded"),
    (DeadlineUnreachable("late", retry_after_s=2.5), 429, "deadline_unreachable"),
    (DeadlineExceeded("late"), 504, "deadline_exceeded"),
    (NodeLost("gone"), 502, "node_lost"),
    (HandoffFailed("torn"), 502, "handoff_failed"),
    (StaleEpoch("old"), 502, "stale_epoch"),
    (InternalError("bug"), 500, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "code"), STATUS)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_error_before_the_first_token_is_a_status(
    error: Exception, status: int, code: str, is_stream: bool
) -> None:
    edge = make_edge(fails(error))
    response = await post(edge, CHAT_PATH, CHAT | {"stream": is_stream})
    assert response.status_code == status
    wrong = response.json()["error"]
    assert (wrong["code"], wrong["message"]) == (code, str(error))
    kinds = {400: "invalid_request_error", 429: "rate_limit_error"}
    assert wrong["type"] == kinds.get(status, "server_error")
    retry_after = {429: "3", 502: "1", 503: "3"}.get(status)
    assert response.headers.get("retry-after") == retry_after
    outcome = {"endpoint": "chat.completions", "outcome": code}
    assert edge.metric("pdserve_requests_total", **outcome) == 1


@pytest.mark.parametrize(("error", "status", "code"), STATUS)
async def test_an_error_after_the_first_token(error: Exception, status: int, code: str) -> None:
    script = fails(error, after=first_chunk())
    *payloads, last, done = await streamed(make_edge(script), TEXT_PATH, TEXT)
    assert done == "[DONE]"
    assert [p["choices"][0]["text"] for p in payloads] == ["Hello"]
    assert last["error"]["code"] == code
    response = await post(make_edge(script), TEXT_PATH, TEXT | {"stream": False})
    assert response.status_code == status


async def test_a_bug_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    edge = make_edge(fails(RuntimeError("secret")))
    response = await post(edge, CHAT_PATH, CHAT)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("status", "model"), [(502, "tiny"), (404, "unknown"), (429, "tiny")])
async def test_a_request_that_failed_is_freed_without_the_garbage_collector(
    status: int, model: str, is_stream: bool
) -> None:
    """Else a flood of refused requests would stay in memory until the collector runs."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for part in chunks([]):
            yield part
        raise NodeLost("gone")  # an error that nothing else holds

    edge = make_edge(play, max_concurrent_requests=0 if status == 429 else 1)
    body = TEXT | {"model": model, "stream": is_stream}
    gc.disable()
    try:
        before = {id(one) for one in gc.get_objects() if type(one) is Reply}
        assert (await post(edge, TEXT_PATH, body)).status_code == status
        left = {id(one) for one in gc.get_objects() if type(one) is Reply}
        assert left <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_one_failing_choice_ends_the_others(is_stream: bool) -> None:
    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        yield first_chunk()[0]
        if call.sampling.seed == 5:
            raise NodeLost("gone")
        await asyncio.Event().wait()

    edge = make_edge(play)
    response = await post(edge, TEXT_PATH, TEXT | {"n": 3, "seed": 5, "stream": is_stream})
    if is_stream:
        assert events(response.content)[-2]["error"]["code"] == "node_lost"
    else:
        assert response.status_code == 502
    assert len(edge.generator.calls) == 3
    assert all(call.closed.is_set() for call in edge.generator.calls)


@pytest.mark.parametrize("n", [1, 3])
async def test_the_deadline_before_and_after_the_first_token(n: int) -> None:
    time = StoppedTime()
    edge = make_edge(runs_out_of_time(time), clock=time, request_timeout_s=7.5)
    response = await post(edge, TEXT_PATH, TEXT | {"n": n})
    assert response.status_code == 504
    assert "7.5 s" in response.json()["error"]["message"]
    assert [call.deadline_s for call in edge.generator.calls] == [7.5] * n
    assert all(call.closed.is_set() for call in edge.generator.calls)

    edge = make_edge(runs_out_of_time(time, first_chunk()), clock=time, request_timeout_s=7.5)
    *payloads, last, _ = await streamed(edge, TEXT_PATH, TEXT | {"n": n})
    assert [payload["choices"][0]["text"] for payload in payloads] == ["Hello"] * n
    assert last["error"]["code"] == "deadline_exceeded"
    assert all(call.closed.is_set() for call in edge.generator.calls)


async def test_what_a_body_took_to_arrive_is_gone_from_the_nodes_time() -> None:
    """One deadline for the whole path."""
    time = StoppedTime()
    edge = make_edge(clock=time, request_timeout_s=7.5)

    async def slow_body() -> AsyncIterator[bytes]:
        body = json.dumps(TEXT).encode()
        yield body[:5]
        time.advance(2)
        yield body[5:]

    async with edge.client() as client:
        assert (await client.post(TEXT_PATH, content=slow_body())).status_code == 200
    assert [call.deadline_s for call in edge.generator.calls] == [5.5]


async def test_too_many_at_once() -> None:
    running, release = asyncio.Event(), asyncio.Event()

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        running.set()
        await release.wait()
        for part in chunks([5], FinishReason.LENGTH):
            yield part

    edge = make_edge(play, max_concurrent_requests=1)
    async with edge.client() as client:
        first = asyncio.create_task(client.post(TEXT_PATH, json=TEXT))
        await running.wait()
        refused = await client.post(TEXT_PATH, json=TEXT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert (await client.get("/health")).status_code == 200
        release.set()
        assert (await first).status_code == 200
        assert (await client.post(TEXT_PATH, json=TEXT)).status_code == 200
