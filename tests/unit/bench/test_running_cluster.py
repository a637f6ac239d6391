"""A client of a running cluster: which events of a stream are pieces of an answer."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from bench.running_cluster import Answer, RunningCluster

EVENTS = (
    {"choices": [{"text": "", "prompt_token_ids": [5, 6]}]},
    {"choices": [{"text": "a", "token_ids": [7]}]},
    {"choices": [{"text": "", "token_ids": [8, 9]}]},
    {"choices": [{"text": "", "finish_reason": "length", "token_ids": []}]},
    {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 2}},
)


@pytest.mark.parametrize(("asked", "num_pieces"), [({"return_token_ids": True}, 2), ({}, 4)])
def test_with_token_ids_a_piece_has_some(asked: dict[str, object], num_pieces: int) -> None:
    """Neither the ids of the prompt nor the reason of the end are one."""
    stream = "".join(f"data: {json.dumps(one)}\n\n" for one in EVENTS) + "data: [DONE]\n\n"

    async def answer() -> Answer:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=stream))
        async with httpx.AsyncClient(transport=transport, base_url="http://there") as client:
            return await RunningCluster(client, "m").answer(asked)

    found = asyncio.run(answer())
    assert found.token_ids == (7, 8, 9)
    assert found.timing.num_tokens == 3
    assert len(found.timing.chunk_at_s) == num_pieces
