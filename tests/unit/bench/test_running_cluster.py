"""A client of a running cluster: which events of a stream are pieces of an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

import bench.running_cluster
from bench.running_cluster import Answer, RunningCluster, running_cluster
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.http.http_server import served

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


ANSWERS: dict[str, dict[str, Any]] = {
    "/ready": {},
    "/v1/cluster": {"nodes": [{"node_id": "mixed-1", "role": "mixed"}]},
    "/v1/models": {"data": [{"id": "m"}]},
}


@pytest.mark.covers("M02")
async def test_what_is_measured_is_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that the environment names would be measured too, or know no such address."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(ANSWERS[scope["path"]])(scope, receive, send)

    async with served(answer) as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_loopback_port()}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.setattr(bench.running_cluster, "START_TIMEOUT_S", 0.0)
        async with running_cluster(f"http://127.0.0.1:{port}") as cluster:
            assert await cluster.nodes() == {"mixed-1": ANSWERS["/v1/cluster"]["nodes"][0]}
