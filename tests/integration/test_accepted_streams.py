"""Streams over a real dispatcher and scripted nodes: what clients see before a token (W06)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from common.errors import Overloaded
from common.nodes import Role
from common.request import FinishReason, GenerationRequest
from protos import pdserve_node_pb2 as pb
from protos.codec import refusal_to_proto
from tests.integration.scripted_cluster import Cluster, asked, tokens, wait_until
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)
from tests.support.http.edge_model import tiny_model
from tests.support.http.http_edge import events, make_edge
from tests.support.http.http_server import raw_request, served

PATH = "/v1/completions"
OK = b"HTTP/1.1 200 OK\r\n"
HELLO = tiny_model().encode("Hello", add_special_tokens=False, param="text")[0]
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def streaming(cluster: Cluster) -> AsyncIterator[Client]:
    """A client that asked a router over the cluster for a stream."""
    router = await cluster.router()
    edge = make_edge(generator=cast(Any, router))
    body = json.dumps({"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 4}).encode()
    async with served(edge.app) as port, raw_request(port, PATH, body) as (reader, writer):
        async with asyncio.timeout(60):
            yield reader, writer


async def head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def body(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    return b"".join(parts)


async def refuse(_request: GenerationRequest, _what: Any) -> pb.Reply:
    full = Overloaded("no seat", retry_after_s=2.5)
    return pb.Reply(refusal=refusal_to_proto(full))


@pytest.mark.covers("W06")
@pytest.mark.parametrize("is_local", [True, False])
async def test_the_status_is_sent_when_the_node_has_accepted(
    cluster: Cluster, is_local: bool
) -> None:
    p = None if is_local else await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE)
    async with streaming(cluster) as (reader, _):
        assert (await head(reader)).startswith(OK)
        request = await asked(p or d)
        first = int(p is not None)
        if p is not None:
            p.push(tokens(request.id, 0, HELLO))
        end = FinishReason.LENGTH
        d.push(tokens(request.id, first, HELLO, is_started=True, finish_reason=end))
        *said, _, done = events(await body(reader))
        assert done == "[DONE]"
        # A token that overtook the one before it leaves together with that.
        assert "".join(one["choices"][0]["text"] for one in said) == "Hello" * (1 + first)


@pytest.mark.covers("W06")
async def test_another_node_goes_on_behind_the_status_unseen(cluster: Cluster) -> None:
    first = await cluster.add("d0", Role.DECODE)
    second = await cluster.add("d1", Role.DECODE)
    async with streaming(cluster) as (reader, _):
        assert (await head(reader)).startswith(OK)
        took, other = (first, second) if first.asked else (second, first)
        await took.die()
        cluster.nodes.remove(took)
        request = await asked(other)
        end = FinishReason.LENGTH
        other.push(tokens(request.id, 0, HELLO, is_started=True, finish_reason=end))
        said, last, done = events(await body(reader))
        assert said["choices"][0]["text"] == "Hello"
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


@pytest.mark.covers("W06")
async def test_a_refused_ticket_and_full_nodes_are_a_status(cluster: Cluster) -> None:
    """The decode node granted its room, and nobody takes the prompt."""
    p = await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE)
    p.on_prefill = refuse

    async def reserve(request: GenerationRequest, is_local: bool) -> pb.Reply:
        return await (refuse if is_local else d._grant)(request, is_local)

    d.on_reserve = reserve
    async with streaming(cluster) as (reader, _):
        said = await head(reader)
        assert said.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 3" in said
        assert p.asked


@pytest.mark.covers("F58", "W06")
async def test_leaving_before_the_first_token_aborts_both_legs(cluster: Cluster) -> None:
    p = await cluster.add("p0", Role.PREFILL)
    d = await cluster.add("d0", Role.DECODE)
    async with streaming(cluster) as (reader, writer):
        await head(reader)
        request = await asked(p)
        writer.close()
        await wait_until(lambda: p.aborted == d.aborted == [request.id], "both were told")
        (router,) = cluster.routers
        assert router.num_running == 0
