"""The dispatcher against nodes that break the protocol, on real gRPC connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest

from common.errors import (
    PeerProtocolError,
)
from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.request import FinishReason, GenerationRequest
from protos import pdserve_node_pb2 as pb
from tests.integration.fake_node import IDLE, record_of
from tests.integration.scripted_cluster import (
    Cluster,
    asked,
    ids,
    start,
    tokens,
    wait_until,
)
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)


def one_output(details: pb.OutputDetails) -> pb.OutputBatch:
    """A batch that is well but for these."""
    return pb.OutputBatch(
        request_ids=["x"],
        attempts=[1],
        first_indexes=[0],
        num_tokens=[2],
        token_ids=[1, 2],
        details=[details],
    )


@pytest.mark.covers("F67")
@pytest.mark.parametrize(
    "garbage",
    [
        pb.OutputBatch(request_ids=[""], attempts=[1], first_indexes=[0], num_tokens=[0]),
        pb.OutputBatch(request_ids=["x"], attempts=[0], first_indexes=[0], num_tokens=[0]),
        pb.OutputBatch(request_ids=["x"], attempts=[1], first_indexes=[0], num_tokens=[2]),
        one_output(pb.OutputDetails(finish_reason="whim")),
        one_output(pb.OutputDetails(finish_reason="error")),
        one_output(pb.OutputDetails(logprobs=[pb.TokenLogprobs()])),
    ],
)
async def test_a_node_that_breaks_the_protocol_is_lost(
    cluster: Cluster, garbage: pb.OutputBatch
) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    await asked(d)
    d.push_raw(garbage)
    # It is heard again, and used again.
    request = await asked(d, 2)
    assert request.id.attempt == 2
    d.push(tokens(request.id, 0, 10, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10]


@pytest.mark.covers("F52")
async def test_outputs_of_unknown_requests_are_ignored(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    request = await asked(d)
    d.push(
        tokens(AttemptId("nobody", 1), 0, 1, 2, 3),
        tokens(AttemptId(request.id.choice_id, 7), 0, 1),
        tokens(request.id, 0, 10, finish_reason=FinishReason.STOP),
    )
    assert ids(await answer) == [10]


async def test_an_index_beyond_max_tokens_is_a_broken_peer(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    request = await asked(d)
    d.push(tokens(request.id, 0, 10))
    d.push(tokens(request.id, 2**31, 10))
    with pytest.raises(PeerProtocolError, match="max_tokens is 8"):
        await answer


async def test_an_empty_reserve_reply_is_no_answer(cluster: Cluster) -> None:
    d = await cluster.add("d0", Role.DECODE)
    router = await cluster.router()

    async def nothing(_request: GenerationRequest, _is_local: bool) -> pb.Reply:
        return pb.Reply()

    d.on_reserve = nothing
    with pytest.raises(PeerProtocolError, match="with nothing"):
        await start(router)
    await wait_until(lambda: len(d.aborted) == 1, "aborted")


async def test_a_server_that_speaks_something_else_is_never_chosen(cluster: Cluster) -> None:
    async def garbage(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    bad = record_of(Incarnation("bad", 1), Role.DECODE, f"127.0.0.1:{port}")
    await cluster.store.heartbeat(bad, IDLE, lease_s=600)
    good = await cluster.add("good", Role.DECODE)
    router = await cluster.router()
    answer = start(router)
    request = await asked(good)
    good.push(tokens(request.id, 0, 10, finish_reason=FinishReason.STOP))
    assert ids(await answer) == [10]
    server.close()
    await server.wait_closed()


async def test_bytes_that_are_no_message_lose_the_node(cluster: Cluster) -> None:
    num_streams = 0

    async def stream(_request: Any, _context: Any) -> AsyncGenerator[bytes, None]:
        nonlocal num_streams
        num_streams += 1
        yield b"\xff\xff\xff\xff"

    handlers = {
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server = grpc.aio.server()
    generic = grpc.method_handlers_generic_handler("pdserve.node.v1.Node", handlers)
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    bad = record_of(Incarnation("bad", 1), Role.DECODE, f"127.0.0.1:{port}")
    await cluster.store.heartbeat(bad, IDLE, lease_s=600)
    good = await cluster.add("good", Role.DECODE)
    router = await cluster.router()
    await wait_until(lambda: num_streams >= 2, "tried again")
    assert [node.incarnation for node in router.pool.nodes()] == [good.incarnation]
    await server.stop(None)
