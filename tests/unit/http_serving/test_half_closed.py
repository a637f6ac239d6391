"""Clients that send no more before they have their answer (W07): half closed, or gone."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from http_serving import half_closed
from http_serving.bounded_connections import ConnectionLimits
from http_serving.half_closed import CONTINUE, ZERO, probe_of
from http_serving.server import bind, make_server
from tests.support.http.http_server import eventually

LIMITS = ConnectionLimits(max_connections=9, request_timeout_s=60.0, idle_timeout_s=60.0)
BIG = b"x" * (8 << 20)
"""More than the buffers of a connection hold."""

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """An event loop: each tells of the end of a connection in its own way."""
    chosen: Run = request.param
    return chosen


class App:
    """Answers when it may: whole, in two parts, or in parts of which it sends the first at once."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_asked = 0
        self.num_lost = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message["more_body"]
        self.num_asked += 1
        answering = asyncio.create_task(self._answer(scope["path"], send))
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            assert leaving.result()["type"] == "http.disconnect"
            self.num_lost += 1
        answering.cancel()
        leaving.cancel()

    async def _answer(self, path: str, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if path == "/begun":
            await send(start)
            await send({"type": "http.response.body", "body": b"now", "more_body": True})
        await self.may_answer.wait()
        if path in ("/whole", "/big"):
            body = BIG if path == "/big" else b"hello"
            length = (b"content-length", b"%d" % len(body))
            await send(start | {"headers": [length]})
            await send({"type": "http.response.body", "body": body})
            return
        if path != "/begun":
            await send(start)
        for part in (b"hel", b"", b"lo"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Client:
    """A raw connection to the application."""

    def __init__(
        self, app: App, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.app = app
        self.reader = reader
        self.writer = writer

    async def asks(self, path: str, version: str = "1.1") -> None:
        num_asked = self.app.num_asked
        self.writer.write(asked(path, version))
        await eventually(lambda: self.app.num_asked > num_asked)

    async def answer(self) -> bytes:
        async with asyncio.timeout(30):
            return await self.reader.read()


def asked(path: str, version: str = "1.1") -> bytes:
    return f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi".encode()


@asynccontextmanager
async def served() -> AsyncIterator[Client]:
    listener, app = bind("127.0.0.1", 0, backlog=4), App()
    server = make_server(app, limits=LIMITS, end_within_s=1.0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield Client(app, reader, writer)
    finally:
        app.may_answer.set()
        writer.transport.abort()
        server.should_exit = True
        await serving


def body_of(answer: bytes) -> bytes:
    """The body of an answer, whose chunks are read as the standard says."""
    while answer.startswith(CONTINUE):
        answer = answer.removeprefix(CONTINUE)
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not (length := int(size, 16)):
            assert rest == b"\r\n"
            return body
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]


@pytest.mark.covers("W07")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/whole", "/parts", "/begun", "/big"])
def test_a_half_closed_client_gets_its_whole_answer(run: Run, path: str, version: str) -> None:
    async def test() -> None:
        async with served() as client:
            await client.asks(path, version)
            client.writer.write_eof()
            probe = {"1.0": b"", "1.1": ZERO if path == "/begun" else CONTINUE}[version]
            first = b""
            async with asyncio.timeout(30):
                if path == "/begun":
                    first = await client.reader.readuntil(b"now")
                if probe:  # it is asked whether it is gone, more than once
                    first += await client.reader.readuntil(probe)
                    first += await client.reader.readuntil(probe)
            client.app.may_answer.set()
            whole = {"/big": BIG, "/begun": b"nowhello"}.get(path, b"hello")
            assert body_of(first + await client.answer()) == whole
            assert client.app.num_lost == 0

    run(test())


@pytest.mark.covers("W07")
def test_all_that_was_asked_before_is_answered(run: Run) -> None:
    async def test() -> None:
        async with served() as client:
            client.app.may_answer.set()
            client.writer.write(asked("/whole") + asked("/whole") + asked("/whole")[:-1])
            client.writer.write_eof()
            assert (await client.answer()).count(b"hello") == 2
            assert client.app.num_asked == 2

    run(test())


@pytest.mark.parametrize("data", [b"", b"POST / HTT", asked("/whole")[:-1]])
def test_a_client_that_closes_before_a_whole_request_is_closed(run: Run, data: bytes) -> None:
    async def test() -> None:
        async with served() as client:
            client.writer.write(data)
            client.writer.write_eof()
            assert await client.answer() == b""
            assert client.app.num_asked == 0

    run(test())


BAD_CHUNK = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"


@pytest.mark.parametrize("behind", [b"what is this?\r\n\r\n", BAD_CHUNK])
def test_what_follows_the_requests_and_is_none_does_not_cost_their_answers(
    run: Run, behind: bytes
) -> None:
    async def test() -> None:
        async with served() as client:
            await client.asks("/whole")
            client.writer.write(asked("/whole") + behind)
            client.writer.write_eof()
            client.app.may_answer.set()
            assert (await client.answer()).count(b"hello") == 2

    run(test())


@pytest.mark.covers("F58", "W07")
@pytest.mark.parametrize("path", ["/whole", "/parts", "/begun"])
@pytest.mark.parametrize("how", ["close", "shutdown", "reset", "half closed before"])
def test_a_client_that_is_gone_is_noticed_before_anything_else_is_sent(
    run: Run, path: str, how: str
) -> None:

    async def test() -> None:
        async with served() as client:
            await client.asks(path)
            if path == "/begun":
                await client.reader.readuntil(b"now")
            peer = client.writer.get_extra_info("socket")
            if how == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how == "half closed before":
                client.writer.write_eof()
            if how == "shutdown":
                with peer.dup() as same:
                    same.shutdown(socket.SHUT_RDWR)
            else:
                client.writer.transport.abort()
            await eventually(lambda: client.app.num_lost)

    run(test())


@pytest.mark.covers("W07")
def test_a_client_of_http_1_0_that_is_gone_is_noticed_by_the_kernel(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be written before its answer. The kernel of this client forgets it at once."""
    monkeypatch.setattr(half_closed, "KEEPALIVE_S", 1)

    async def test() -> None:
        async with served() as client:
            await client.asks("/whole", "1.0")
            peer = client.writer.get_extra_info("socket")
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)
            client.writer.close()
            await eventually(lambda: client.app.num_lost)

    run(test())


@pytest.mark.covers("F88")
def test_a_half_closed_client_that_does_not_read_its_answer_is_let_go(run: Run) -> None:
    """As any other that does not."""
    limits = replace(LIMITS, leaving_timeout_s=0.1)

    async def test() -> None:
        listener, app = bind("127.0.0.1", 0, backlog=4), App()
        server = make_server(app, limits=limits, end_within_s=1.0)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        with socket.create_connection(listener.getsockname()) as peer:
            peer.sendall(asked("/big"))
            peer.shutdown(socket.SHUT_WR)
            app.may_answer.set()
            await eventually(lambda: app.num_asked and not server.server_state.connections)
        server.should_exit = True
        await serving

    run(test())


@pytest.mark.parametrize(
    ("version", "state", "probe"),
    [
        ("1.1", {}, CONTINUE),
        ("1.0", {}, b""),
        ("1.1", {"response_started": True, "chunked_encoding": True}, ZERO),
        ("1.1", {"response_started": True, "chunked_encoding": False}, b""),
        ("1.1", {"response_started": True, "chunked_encoding": None}, b""),
        ("1.1", {"response_complete": True, "chunked_encoding": True}, b""),
    ],
)
def test_what_is_written_spoils_no_answer(
    version: str, state: dict[str, Any], probe: bytes
) -> None:
    def cycle(*, is_stuck: bool) -> Any:
        usual = {"response_started": False, "response_complete": False, "chunked_encoding": None}
        flow = SimpleNamespace(write_paused=is_stuck)
        return SimpleNamespace(scope={"http_version": version}, flow=flow, **(usual | state))

    assert probe_of(cycle(is_stuck=False)) == probe
    assert probe_of(cycle(is_stuck=True)) == b"", "it waits for the client to read"
