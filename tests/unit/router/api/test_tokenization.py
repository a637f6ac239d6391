"""`/tokenize` and `/detokenize`: what a node would get, and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.api.tokenization import MAX_DETOKENIZE_BYTES
from router.core.generation import TokenChunk
from router.http.routes import Access
from tests.support.http.edge_model import CONTEXT, tiny_model
from tests.support.http.http_edge import Edge, declared_routes, make_edge
from tests.support.http.scripted_generator import Call

MODEL = tiny_model()


async def post(path: str, body: Any, edge: Edge | None = None) -> tuple[int, Any]:
    edge = edge or make_edge()
    async with edge.client() as client:
        reply = await client.post(path, json=body)
    assert edge.generator.calls == []
    return reply.status_code, reply.json()


async def test_a_prompt() -> None:
    status, answer = await post("/tokenize", {"model": "tiny", "prompt": "Hello world"})
    wanted = MODEL.encode("Hello world", add_special_tokens=True, param="prompt")
    assert status == 200
    assert answer == {"count": len(wanted), "max_model_len": CONTEXT, "tokens": list(wanted)}


async def test_a_prompt_without_special_tokens() -> None:
    text = "Hello world"
    status, answer = await post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert status == 200
    assert answer["tokens"] == list(MODEL.encode(text, add_special_tokens=True, param=""))[1:]
    status, answer = await post("/tokenize", {"prompt": text, "add_special_tokens": "no"})
    assert (status, answer["error"]["param"]) == (400, "add_special_tokens")


async def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    status, answer = await post("/tokenize", {"prompt": [5] * (CONTEXT - 1)})
    assert (status, answer["count"]) == (200, CONTEXT - 1)
    status, answer = await post("/tokenize", {"prompt": [5] * CONTEXT})
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_a_conversation() -> None:
    message = {"role": "user", "content": 'say "messages" twice'}
    _, answer = await post("/tokenize", {"messages": [message]})
    text = MODEL.render_chat([message])
    wanted = MODEL.encode(text, add_special_tokens=False, param="messages")
    assert answer["tokens"] == list(wanted)


async def test_a_prompt_that_speaks_of_messages_is_a_prompt() -> None:
    status, answer = await post("/tokenize", {"prompt": '"messages":'})
    assert (status, answer["count"]) == (
        200,
        len(MODEL.encode('"messages":', add_special_tokens=True, param="prompt")),
    )


async def test_a_field_of_that_name_elsewhere_makes_no_conversation() -> None:
    status, _ = await post("/tokenize", {"prompt": "a", "metadata": {"messages": 1}})
    assert status == 200


async def test_they_count_as_requests_of_a_key_and_of_the_router() -> None:
    is_running = asyncio.Event()

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        is_running.set()
        await asyncio.Event().wait()
        yield TokenChunk(0, ())

    edge = make_edge(play, max_concurrent_requests=1)
    rights = {route.path: access for route, access in declared_routes(edge)}
    assert rights["/tokenize"] is rights["/detokenize"] is Access.LIMITED
    async with edge.client() as client:
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        await is_running.wait()
        for path in ("/tokenize", "/detokenize"):
            reply = await client.post(path, json={"prompt": "a", "tokens": [1]})
            assert reply.status_code == 429
        first.cancel()


async def test_unknown_fields_are_refused_where_they_are_in_requests() -> None:
    status, answer = await post(
        "/tokenize", {"prompt": "a", "foo": 1}, make_edge(strict_fields=True)
    )
    assert (status, answer["error"]["param"]) == (400, "foo")


async def test_there_and_back() -> None:
    _, answer = await post("/tokenize", {"prompt": "Hello world"})
    status, back = await post("/detokenize", {"tokens": answer["tokens"]})
    assert (status, back) == (200, {"prompt": "<|im_start|>Hello world"})


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [MODEL.vocab_size]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [1] * MAX_DETOKENIZE_BYTES}, 413, None),
    ],
)
async def test_what_is_refused(path: str, body: Any, status: int, param: str | None) -> None:
    found, answer = await post(path, body)
    assert (found, answer["error"]["param"]) == (status, param)


async def test_an_api_key_is_required() -> None:
    for path in ("/tokenize", "/detokenize", "/version"):
        status, _ = await post(path, {"prompt": "a"}, make_edge(api_key="sesame"))
        assert status == 401
