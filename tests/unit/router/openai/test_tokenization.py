"""`/tokenize` and `/detokenize`: what a node would get, and back."""

from __future__ import annotations

from typing import Any

import pytest

from router.openai.tokenization import MAX_DETOKENIZE_BYTES
from tests.fakes.http_edge import CONTEXT, Edge, make_edge, tiny_model

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
