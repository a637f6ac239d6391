"""Requests to the two generation endpoints."""

from __future__ import annotations

from typing import Any

from tests.support.http.edge_model import tiny_model
from tests.support.http.http_edge import Edge

MODEL = tiny_model()
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


def encode(text: str, *, special: bool = False) -> tuple[int, ...]:
    return MODEL.encode(text, add_special_tokens=special, param="text")


async def post(edge: Edge, path: str, body: dict[str, Any]) -> Any:
    async with edge.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()
