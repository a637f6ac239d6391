"""What coding agents send to each endpoint, and the prompt that it becomes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import hermes_model

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNT = f"{MESSAGES}/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TEXT: dict[str, Any] = {"type": "text", "text": "Hi"}
OWN: dict[str, dict[str, Any]] = {
    MESSAGES: {"name": "f", "input_schema": {"type": "object"}},
    RESPONSES: {"type": "function", "name": "f", "parameters": {"type": "object"}},
}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": "Hi", **fields}
    return {"max_tokens": 9, "messages": [USER], **fields}


async def post(edge: Edge, path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with edge.client() as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def edge_that_says(text: str = "x", **config: Any) -> Edge:
    return make_edge(says(text), model=hermes_model(), **config)


def prompt_of(edge: Edge) -> str:
    return edge.model.decode(edge.generator.calls[-1].prompt_token_ids, with_special_tokens=True)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def message(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content)}
