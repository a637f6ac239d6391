"""Strangers at a node's gRPC port: bounded connections, calls, metadata and messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import ConfigError
from node.control.control_port import (
    MAX_CONNECTIONS,
    MAX_METADATA_BYTES,
    SERVER_OPTIONS,
    ControlPort,
)
from node.control.control_service import MAX_MESSAGE_BYTES
from tests.support.clocks.stall_free_clock import LONGEST_LOOK_S, LOOK_S, StallFreeClock

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers every method with the length of what it got."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return b"%d" % len(request)

        return grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def node_port(**changes: Any) -> AsyncIterator[int]:
    """A server with a node's own options, but for `changes`."""
    options = {**dict(SERVER_OPTIONS), **{f"grpc.{key}": value for key, value in changes.items()}}
    server = grpc.aio.server(options=list(options.items()))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def calling(port: int) -> AsyncIterator[Any]:
    """A router's side: nothing bounds what it sends."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        plain: Any = channel
        yield plain.unary_unary("/pdserve/echo")


async def closed(reader: asyncio.StreamReader, *, within_s: float = 20.0) -> None:
    """The other side has closed, whatever it said before; a stall of the machine is no time."""
    reading, clock = asyncio.ensure_future(reader.read()), StallFreeClock(LONGEST_LOOK_S)
    while not reading.done():
        assert clock.now_s() < within_s
        await asyncio.wait({reading}, timeout=LOOK_S)
    if not isinstance(reading.exception(), ConnectionResetError):
        reading.result()


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with node_port(server_handshake_timeout_ms=200) as port, AsyncExitStack() as stack:
        for said in (b"", HELLO[:10]):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(said)
            await closed(reader)


async def test_a_connection_without_a_call_is_closed() -> None:
    async with node_port(max_connection_idle_ms=200) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HELLO)
        await closed(reader)
        writer.close()


async def test_beyond_the_most_connections_new_ones_are_closed_and_old_ones_work() -> None:
    async with node_port() as port, calling(port) as call, AsyncExitStack() as stack:
        assert await call(b"abc") == b"3"
        for _ in range(MAX_CONNECTIONS - 1):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(HELLO)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        writer.write(HELLO)
        # At once, where one that was let in would end for not answering pings.
        await closed(reader, within_s=5)
        assert await call(b"abcd") == b"4"


@pytest.mark.parametrize(
    ("size", "metadata_bytes"), [(MAX_MESSAGE_BYTES + 1, 0), (1, MAX_METADATA_BYTES + 1)]
)
async def test_what_is_too_large_is_refused_and_the_next_call_works(
    size: int, metadata_bytes: int
) -> None:
    async with node_port() as port, calling(port) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"x" * size, metadata=[("k", "v" * metadata_bytes)])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call(b"x") == b"1"


async def test_a_message_of_the_most_bytes_is_taken() -> None:
    async with node_port() as port, calling(port) as call:
        assert await call(b"x" * MAX_MESSAGE_BYTES) == b"%d" % MAX_MESSAGE_BYTES


async def test_no_two_nodes_listen_on_one_port() -> None:
    first = ControlPort("127.0.0.1", 0, None)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{first.port}: the port is in use"):
        ControlPort("127.0.0.1", first.port, None)
    await first.stop(0.0)
