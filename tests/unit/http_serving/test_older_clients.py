"""Clients of HTTP/1.0, and those that leave within a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send

from http_serving.bounded_connections import ConnectionLimits
from http_serving.server import bind, make_server

LIMITS = ConnectionLimits(max_connections=9, request_timeout_s=60.0, idle_timeout_s=60.0)
START = {"type": "http.response.start", "status": 200, "headers": [(b"x-test", b"y")]}


class App:
    """Answers when it may, in two parts of unknown length, or in one of a known length."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_asked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message["more_body"]
        self.num_asked += 1
        gone = asyncio.create_task(self._watch(receive))
        try:
            if scope["path"] != "/quick":
                await self.may_answer.wait()
            if scope["path"] == "/whole":
                headers = [(b"content-length", b"5")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b"hello"})
                return
            await send(START)
            for part in (b"hel", b"", b"lo"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()

    async def _watch(self, receive: Receive) -> None:
        assert (await receive())["type"] == "http.disconnect"
        self.may_answer.set()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[App, asyncio.StreamReader, asyncio.StreamWriter]]:
    listener, app = bind("127.0.0.1", 0, backlog=4), App()
    server = make_server(app, limits=LIMITS, end_within_s=1.0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield app, reader, writer
    finally:
        app.may_answer.set()
        writer.transport.abort()
        server.should_exit = True
        await serving


def request(path: str, version: str = "1.1", *, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\n{headers}Content-Length: 2\r\n\r\n"
    return head.encode() + b"hi"


async def ended(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(30):
        return await reader.read()


@pytest.mark.covers("W02")
async def test_an_answer_of_http_1_0_has_no_chunks() -> None:
    for path in ("/quick", "/whole"):
        for headers in ("", "Connection: keep-alive\r\n", "Expect: 100-continue\r\n"):
            async with served() as (app, reader, writer):
                app.may_answer.set()
                writer.write(request(path, "1.0", headers=headers))
                head, _, body = (await ended(reader)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                assert b"transfer-encoding" not in head.lower()
                assert body == b"hello"


@pytest.mark.parametrize("data", [b"", b"POST / HTT", request("/")[:-1]])
async def test_a_client_that_closes_before_a_whole_request_is_closed(data: bytes) -> None:
    async with served() as (app, reader, writer):
        writer.write(data)
        writer.write_eof()
        assert await ended(reader) == b""
        assert app.num_asked == 0
