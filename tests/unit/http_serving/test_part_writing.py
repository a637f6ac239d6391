"""Parts of a stream that go straight to their connection, on real sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast
from weakref import ref

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from http_serving.bounded_connections import ConnectionLimits
from http_serving.part_writing import WritePart, offer_parts, part_writer
from http_serving.server import bind, make_server

Answer = Callable[[WritePart, Send], Awaitable[None]]
HEAD = {"type": "http.response.start", "status": 200, "headers": []}
LIMITS = ConnectionLimits(max_connections=9, request_timeout_s=60.0, idle_timeout_s=60.0)
BIG = b"x" * (1 << 20)


@asynccontextmanager
async def asked(answer: Answer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.Task[None]]]:
    """A client that asked once and has read nothing yet; the task ends when `answer` has."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await answer(part_writer(scope), send)
        except Exception as wrong:
            done.set_exception(wrong)
        else:
            done.set_result(None)

    listener = bind("127.0.0.1", 0, backlog=8)
    server = make_server(app, limits=LIMITS, end_within_s=1.0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    async def answered() -> None:
        async with asyncio.timeout(10):
            await done

    try:
        yield reader, asyncio.create_task(answered())
    finally:
        writer.transport.abort()
        server.should_exit = True
        await serving


def part(data: bytes, *, is_last: bool = False) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


async def test_parts_of_both_ways_arrive_in_order_and_as_chunks() -> None:
    async def answer(write: WritePart, send: Send) -> None:
        assert not write(b"before the head")
        await send(HEAD)
        assert write(b"one")
        await send(part(b"two"))
        assert write(b"three")
        await send(part(b"four", is_last=True))
        assert not write(b"behind the end")

    async with asked(answer) as (reader, answered):
        await answered
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        body = await reader.readuntil(b"0\r\n\r\n")
        assert body == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n4\r\nfour\r\n0\r\n\r\n"


@pytest.mark.covers("F88")
async def test_a_client_that_does_not_read_takes_the_way_that_waits() -> None:
    is_full = asyncio.Event()

    async def answer(write: WritePart, send: Send) -> None:
        await send(HEAD)
        while write(BIG):
            pass
        is_full.set()
        await send(part(b"late"))
        assert write(b"later")
        await send(part(b"", is_last=True))

    async with asked(answer) as (reader, answered):
        async with asyncio.timeout(10):
            await is_full.wait()
        assert not answered.done()
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            text = text[-64:] + await reader.read(1 << 20)
        assert text.endswith(b"4\r\nlate\r\n5\r\nlater\r\n0\r\n\r\n")
        await answered


async def test_an_answer_of_known_length_goes_the_other_way() -> None:
    async def answer(write: WritePart, send: Send) -> None:
        await send(HEAD | {"headers": [(b"content-length", b"3")]})
        assert not write(b"one")
        await send(part(b"one", is_last=True))

    async with asked(answer) as (reader, answered):
        await answered
        assert (await reader.readuntil(b"\r\n\r\none")).endswith(b"one")


def test_where_nobody_offers_it_nothing_is_written() -> None:
    assert not part_writer({"type": "http"})(b"part")


def test_an_answer_that_is_over_needs_no_garbage_collector() -> None:
    class Answer:
        """What is used of uvicorn's, and that it holds its scope."""

        flow = transport = None

        def __init__(self, scope: Scope) -> None:
            self.scope = scope

    scope: Scope = {"type": "http", "extensions": {}}
    answer = Answer(scope)
    offer_parts(scope, cast(RequestResponseCycle, answer))
    write, alive = part_writer(scope), ref(answer)
    gc.disable()
    try:
        del answer
        assert alive() is None
    finally:
        gc.enable()
    assert not write(b"part")
