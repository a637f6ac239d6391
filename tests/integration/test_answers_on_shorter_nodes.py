"""Answers whose only node that is long enough is gone, while a shorter one is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest

from common.nodes import Role
from common.request import FinishReason, GenerationRequest
from router.core import candidates, flow_actions
from tests.integration.fake_node import FakeNode
from tests.integration.scripted_cluster import Cluster, asked, no_placements, tokens, wait_until
from tests.integration.scripted_cluster import scripted_cluster as scripted_cluster
from tests.support.http.edge_model import CONTEXT, tiny_model
from tests.support.http.http_edge import Edge, events, make_edge

LONG, SHORT = CONTEXT, 64
PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
HELLO = tiny_model().encode("Hello", add_special_tokens=False, param="text")[0]
Answering = asyncio.Task[httpx.Response]


@asynccontextmanager
async def begun(cluster: Cluster, **body: Any) -> AsyncIterator[tuple[Answering, FakeNode]]:
    """A chat that the long node has begun, with one token, and the short node."""
    long = await cluster.add("d0", Role.DECODE, max_model_len=LONG)
    short = await cluster.add("d1", Role.DECODE, max_model_len=SHORT)
    router = await cluster.router()
    edge: Edge = make_edge(generator=cast(Any, router))
    async with edge.client() as client, asyncio.timeout(60):
        answering = asyncio.create_task(client.post(PATH, json=CHAT | body))
        request = await asked(long)
        long.push(tokens(request.id, 0, HELLO, is_started=True))
        await wait_until(lambda: all(flow.has_first_token for flow in router.flows()), "token 0")
        yield answering, short


def leave(cluster: Cluster) -> Any:
    return cluster.nodes[0].stop()


def in_all(request: GenerationRequest) -> int:
    return len(request.prompt_token_ids) + request.sampling.max_tokens


async def test_a_chat_without_max_tokens_goes_on_up_to_the_length_of_a_shorter_node(
    cluster: Cluster,
) -> None:
    async with begun(cluster, stream=True) as (answering, short):
        assert in_all(cluster.nodes[0].asked[0]) == LONG
        await leave(cluster)
        request = await asked(short)
        assert (in_all(request), request.output_token_ids) == (SHORT, (HELLO,))
        rest = [HELLO] * (request.sampling.max_tokens - 1)
        short.push(tokens(request.id, 1, *rest, finish_reason=FinishReason.LENGTH))
        *parts, done = events((await answering).content)
    assert done == "[DONE]"
    choices = [part["choices"][0] for part in parts]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == tiny_model().decode([HELLO]) * (1 + len(rest))
    assert choices[-1]["finish_reason"] == "length"
    await no_placements(cluster)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_no_other_node_holds_ends_with_what_is_missing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    monkeypatch.setattr(flow_actions, "WAIT_S", 0.001)
    monkeypatch.setattr(candidates, "WAITS_FOR_LONGER", 3)
    async with begun(cluster, stream=is_stream, max_tokens=100) as (answering, short):
        await leave(cluster)
        response = await answering
    if is_stream:
        error = next(part for part in events(response.content) if "error" in part)["error"]
    else:
        assert response.status_code == 502
        error = json.loads(response.content)["error"]
    assert error["code"] == "node_lost"
    assert "d0#1" in error["message"]
    assert f"wanted at most max_model_len = {SHORT}" in error["message"]
    assert short.asked == []
    await no_placements(cluster)


async def test_it_goes_on_in_the_next_life_of_its_node(cluster: Cluster) -> None:
    async with begun(cluster, max_tokens=100) as (answering, short):
        await leave(cluster)
        (router,) = cluster.routers
        await wait_until(lambda: len(router.pool.nodes()) == 1, "the long node is lost")
        again = await cluster.add("d0", Role.DECODE, epoch=2, max_model_len=LONG)
        await cluster.refresh()
        request = await asked(again)
        assert (request.sampling.max_tokens, request.output_token_ids) == (100, (HELLO,))
        again.push(tokens(request.id, 1, HELLO, finish_reason=FinishReason.STOP))
        (choice,) = (await answering).json()["choices"]
    assert choice["message"]["content"] == tiny_model().decode([HELLO, HELLO])
    assert short.asked == []
