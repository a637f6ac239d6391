"""A byte order mark is skipped, and another encoding is named, at every endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http.http_edge import make_edge

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hé"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hé", "max_tokens": 1},
    "/v1/responses": {"input": "Hé", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hé"}], "max_tokens": 1},
    "/tokenize": {"prompt": "Hé"},
    "/detokenize": {"tokens": [2]},
}


@pytest.mark.covers("W03")
@pytest.mark.parametrize("path", BODIES)
async def test_a_byte_order_mark_is_skipped(path: str) -> None:
    text = json.dumps(BODIES[path], ensure_ascii=False)
    async with make_edge().client() as client:
        plain = await client.post(path, content=text.encode())
        marked = await client.post(path, content=text.encode("utf-8-sig"))
        assert plain.status_code == marked.status_code == 200, marked.text
        if path == "/tokenize":
            assert marked.json() == plain.json()


@pytest.mark.covers("W03")
@pytest.mark.parametrize("path", BODIES)
async def test_another_encoding_is_named(path: str) -> None:
    text = json.dumps(BODIES[path], ensure_ascii=False)
    async with make_edge().client() as client:
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
            reply = await client.post(path, content=text.encode(encoding))
            assert reply.status_code == 400
            message = reply.json()["error"]["message"]
            assert f"the body is encoded in {encoding[:6].upper()}: wanted UTF-8" in message
        for broken in (
            text.encode("latin-1").replace(b"{", b'{"x": "\xe9", ', 1),
            b"\xff",
            b"\0{}",
        ):
            assert (await client.post(path, content=broken)).status_code == 400
