"""Strangers' connections over real sockets: each bound closes what exceeds it, and nothing else."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from http_serving.abort_connection import abort_connection
from http_serving.bounded_connections import BoundedConnection, ConnectionLimits, Refused
from http_serving.server import Server, bind, make_server
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.http.http_server import eventually

REQUEST_S, IDLE_S, LEAVING_S = 5.0, 3.0, 2.0
"""Time passes only where a test says so: see `Site.time`."""
SPINS = 50
"""Turns of the event loop after which what has arrived is read, and all that follows is done."""
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Site:
    """A served application and what it has seen."""

    port: int
    server: Server
    time: StoppedTime
    refused: Counter[Refused] = field(default_factory=Counter)
    bodies: list[bytes] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0
    num_gone: int = 0
    clients: list[Client] = field(default_factory=list)

    def connections(self) -> list[BoundedConnection]:
        return [cast(BoundedConnection, one) for one in self.server.server_state.connections]

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append((reader, writer))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def ask(self, data: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        async with self.connection() as (reader, writer):
            writer.write(data)
            return await ended(reader)

    async def pass_time(self, by_s: float) -> None:
        """First all that was sent arrives, then the time passes for the server."""
        await self.settle()
        self.time.advance(by_s)
        await self.settle()

    async def settle(self) -> None:
        """What clients have sent arrives, and is read: the kernel may take a while."""
        await eventually(lambda: not any(is_on_its_way(*client) for client in self.clients))
        for _ in range(SPINS):
            await asyncio.sleep(0)


def is_on_its_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether something that was sent has not reached the server's socket."""
    if reader.at_eof() or writer.transport.is_closing():
        return False
    fd = writer.get_extra_info("socket").fileno()
    (num_unacknowledged,) = struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))
    return bool(num_unacknowledged or writer.transport.get_write_buffer_size())


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What is still to be read; fails when the connection stays open."""
    reading = asyncio.ensure_future(reader.read())
    await eventually(reading.done)
    return b"" if isinstance(reading.exception(), ConnectionResetError) else reading.result()


async def answered(reader: asyncio.StreamReader) -> bytes:
    """One whole answer of the application."""
    reading = asyncio.ensure_future(reader.readuntil(b"\r\n\r\nhello"))
    await eventually(reading.done)
    return reading.result()


@asynccontextmanager
async def site(**own: Any) -> AsyncIterator[Site]:
    bounds: dict[str, Any] = {
        "max_connections": 100,
        "request_timeout_s": REQUEST_S,
        "idle_timeout_s": IDLE_S,
        "leaving_timeout_s": LEAVING_S,
        **own,
    }

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        here.num_asked += 1
        if scope["path"] == "/slow":
            await here.may_answer.wait()
        if scope["path"] == "/parts":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hel", "more_body": True})
            await here.may_answer.wait()
            await send({"type": "http.response.body", "body": b"lo"})
            return
        if scope["path"] == "/gone":
            while (await receive())["type"] != "http.disconnect":
                pass
            here.num_gone += 1
            return
        if scope["path"] == "/refuse":
            # As a refusal of a body by its length does: answered before it is read.
            await send({"type": "http.response.start", "status": 413, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        if scope["path"] == "/abort":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hel", "more_body": True})
            abort_connection(scope)
            return
        while scope["method"] == "POST":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            here.bodies.append(message["body"])
            if not message["more_body"]:
                break
        text = b"hello" * (20_000_000 if scope["path"] == "/much" else 1)
        headers = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    listener = bind("127.0.0.1", 0, backlog=64)
    refused: Counter[Refused] = Counter()
    server = make_server(
        app,
        limits=ConnectionLimits(**bounds),
        on_refused=lambda reason: refused.update([reason]),
        end_within_s=20.0,
    )
    here = Site(listener.getsockname()[1], server, StoppedTime(), refused)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield here
    finally:
        here.may_answer.set()
        here.time.go_on()
        server.should_exit = True
        await serving


async def test_a_connection_that_sends_nothing_is_closed() -> None:
    async with site() as here, here.connection() as (reader, _):
        await here.pass_time(REQUEST_S - 0.5)
        assert len(here.server.server_state.connections) == 1
        await here.pass_time(0.5)
        assert await ended(reader) == b""
        assert here.refused == {Refused.TOO_SLOW: 1}


@pytest.mark.parametrize(
    "beginning",
    [
        b"G",
        b"GET / HTTP/1.1\r\nHo",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\nX: y",
    ],
)
async def test_a_request_that_never_gets_whole_is_closed(beginning: bytes) -> None:
    async with site() as here, here.connection() as (reader, writer):
        writer.write(beginning)
        await here.pass_time(REQUEST_S)
        assert await ended(reader) == b""
        assert here.refused == {Refused.TOO_SLOW: 1}


async def test_a_byte_now_and_then_is_still_too_slow() -> None:
    async with site() as here, here.connection() as (reader, writer):
        for byte in GET[:5]:
            writer.write(bytes([byte]))
            await here.pass_time(REQUEST_S / 5)
        assert await ended(reader) == b""
        assert here.num_asked == 0


async def test_empty_lines_do_not_keep_a_connection() -> None:
    async with site() as here, here.connection() as (reader, writer):
        writer.write(GET)
        await answered(reader)
        for _ in range(6):
            writer.write(b"\r\n")
            await here.pass_time(IDLE_S / 6)
        assert await ended(reader) == b""


@pytest.mark.covers("W09")
async def test_idling_ends_and_the_next_request_has_its_own_time() -> None:
    async with site() as here, here.connection() as (reader, writer):
        writer.write(GET)
        await answered(reader)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
        await here.pass_time(IDLE_S + 1)  # Longer than it might have been idle.
        writer.write(b"b")
        await answered(reader)
        await here.pass_time(IDLE_S)
        assert await ended(reader) == b""
        assert here.refused == {}, "an idle connection was answered all it asked"


async def test_an_answer_may_take_longer_than_any_wait() -> None:
    async with site() as here, here.connection() as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\nGET /next")
        await eventually(lambda: here.num_asked)
        await here.pass_time(REQUEST_S + IDLE_S)  # The next head is not whole either.
        here.may_answer.set()
        await answered(reader)


async def test_a_connection_that_the_application_aborts_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with site() as here:
        async with here.connection() as (reader, writer):
            writer.write(GET.replace(b"/ ", b"/abort "))
            answer = await ended(reader)
        assert not answer.endswith(b"0\r\n\r\n")
        assert await answer_of_another(here)
    assert not caplog.records


async def answer_of_another(here: Site) -> bytes:
    async with here.connection() as (reader, writer):
        writer.write(GET)
        return await answered(reader)


@pytest.mark.covers("F88")
async def test_a_client_that_does_not_read_its_last_answer_is_let_go() -> None:
    async with site() as here, here.connection() as (reader, writer):
        writer.write(b"GET /much HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await eventually(lambda: here.num_asked)
        await here.pass_time(LEAVING_S)
        await eventually(lambda: not here.server.server_state.connections)
        assert len(await ended(reader)) < 100_000_000


async def test_a_connection_that_closes_after_its_answer_is_not_cut_for_a_new_one() -> None:
    async with site(max_connections=1) as here, here.connection() as (reader, writer):
        writer.write(b"GET /much HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await eventually(lambda: here.num_asked)
        async with here.connection() as (new, new_w):
            new_w.write(GET)
            assert await answered(new)
            assert here.refused == {}
            assert len(await ended(reader)) > 100_000_000


BIG = 4096


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 100_000,
        b"GET /" + b"a" * BIG + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000,
        b"GET / HTTP/1.1\r\nX: " + b"a" * BIG + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 11 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000,
    ],
    ids=["path", "whole path", "value", "whole value", "name", "one too many", "far too many"],
)
async def test_a_large_head_is_refused(head: bytes) -> None:
    async with site(max_head_bytes=BIG, max_headers=10) as here:
        reply = await here.ask(head)
        assert reply.startswith(b"HTTP/1.1 431 ")
        assert reply.endswith(b"than this server takes.")
        assert here.refused == {Refused.HEAD_TOO_LARGE: 1}
        assert here.num_asked == 0


async def test_a_head_that_just_fits_is_served() -> None:
    async with site(max_head_bytes=BIG, max_headers=10) as here, here.connection() as (r, w):
        rest = BIG - len(b"/hostxx") - 200
        w.write(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * rest + b"\r\n\r\n")
        await answered(r)
        w.write(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10 + b"\r\n")
        await answered(r)


@pytest.mark.parametrize(
    "tail",
    [
        b"0\r\nX: " + b"a" * 100_000,
        b"0\r\n" + b"X: y\r\n" * 20_000,
        b"5;ext=" + b"a" * 100_000,
    ],
    ids=["trailer", "trailers", "extension"],
)
async def test_trailers_and_chunk_extensions_do_not_grow(tail: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    async with site(max_head_bytes=BIG) as here, here.connection() as (reader, writer):
        writer.write(head)
        await eventually(lambda: here.bodies)
        writer.write(tail)
        assert (await ended(reader)).startswith(b"HTTP/1.1 431 ")


async def test_a_large_body_is_no_head() -> None:
    body = b"x" * 500_000
    async with site(max_head_bytes=BIG) as here, here.connection() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n" + body)
        await answered(reader)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 1000):
            writer.write(b"3e8\r\n" + body[start : start + 1000] + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await answered(reader)
        assert b"".join(here.bodies) == body + body


async def test_a_body_that_was_refused_is_let_in_for_a_while_only() -> None:
    async with site() as here, here.connection() as (reader, writer):
        writer.write(b"POST /refuse HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b" 413 " in await reader.readuntil(b"no\r\n0\r\n\r\n")
        for _ in range(6):
            writer.write(b"3\r\nabc\r\n")
            await here.pass_time(LEAVING_S / 6)
        assert await ended(reader) == b""


@pytest.mark.covers("W09")
async def test_a_connection_whose_refused_body_has_ended_idles_as_any_other() -> None:
    async with site() as here, here.connection() as (reader, writer):
        writer.write(b"POST /refuse HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b" 413 " in await reader.readuntil(b"no\r\n0\r\n\r\n")
        writer.write(b"3\r\nabc\r\n0\r\n\r\n")
        await here.pass_time(LEAVING_S)
        writer.write(GET)
        await answered(reader)
        await here.pass_time(IDLE_S)
        assert await ended(reader) == b""


@pytest.mark.parametrize("data", [b"\x00" * 1000, b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"])
async def test_what_is_no_http_is_refused(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with site() as here:
        assert (await here.ask(data)).startswith(b"HTTP/1.1 400 ")
        assert here.refused == {Refused.MALFORMED: 1}
    assert caplog.messages == []


SLOW = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
PARTS = b"GET /parts HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
NO_REQUESTS = {
    "noise": b"\x00" * 1000,
    "a large head": b"GET / HTTP/1.1\r\nX: " + b"a" * 2 * BIG,
    "a bad chunk": CHUNKED + b"3\r\nabc\r\nnonsense\r\n",
}


@pytest.mark.parametrize("first", [SLOW, PARTS], ids=["before its answer", "within its answer"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", NO_REQUESTS)
async def test_what_is_no_request_is_not_answered_before_the_requests_ahead_of_it(
    name: str, number: int, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer to it came in the middle of another one, or in place of it."""
    async with site(max_head_bytes=BIG) as here, here.connection() as (reader, writer):
        writer.write(first + GET * (number - 1))
        await eventually(lambda: here.num_asked)
        writer.write(NO_REQUESTS[name])
        await here.settle()
        writer.write(b"more of it")
        await here.settle()
        here.may_answer.set()
        answers = await ended(reader)
        # With a request that waits nothing more is read, until it is answered too.
        *right, behind = answers.split(b"HTTP/1.1 ")[1:] + [b"400"] * (number == 1)
        assert [answer[:3] for answer in right] == [b"200"] * number
        assert behind.startswith((b"400", b"431"))
        assert answers.replace(b"\r\n2\r\n", b"").count(b"hello") == number
        assert here.refused.total() == 1
    assert caplog.messages == []


async def test_a_bad_chunk_behind_an_early_answer_is_not_answered_again() -> None:
    async with site() as here, here.connection() as (reader, writer):
        writer.write(CHUNKED.replace(b"/", b"/refuse", 1))
        assert b" 413 " in await reader.readuntil(b"no\r\n0\r\n\r\n")
        writer.write(b"nonsense\r\n")
        assert await ended(reader) == b""


async def test_a_bad_chunk_ends_its_request() -> None:
    async with site() as here, here.connection() as (reader, writer):
        writer.write(CHUNKED + b"3\r\nabc\r\n")
        await eventually(lambda: here.bodies)
        writer.write(b"nonsense\r\n")
        assert (await ended(reader)).startswith(b"HTTP/1.1 400 ")
        await eventually(lambda: not here.server.server_state.tasks)


@pytest.mark.parametrize("num_behind", [0, 1, 3])
async def test_a_request_is_told_that_its_client_left_whatever_waits_behind_it(
    num_behind: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest request alone was told: the one in progress went on to its end."""
    async with site() as here, here.connection() as (_, writer):
        writer.write(b"GET /gone HTTP/1.1\r\nHost: x\r\n\r\n" + GET * num_behind)
        await eventually(lambda: here.num_asked)
        here.connections()[0].transport.abort()
        await eventually(lambda: here.num_gone == 1)
        await eventually(lambda: not here.server.server_state.tasks)
        assert here.num_asked == 1
    assert caplog.messages == []


async def test_a_websocket_is_not_spoken_and_floods_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with site(max_head_bytes=BIG) as here, here.connection() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade)
        await answered(reader)
        writer.write(b"\x81\x05hello" * 10_000)
        await ended(reader)
    assert caplog.messages == []


@pytest.mark.covers("F98")
async def test_beyond_the_most_connections_the_one_that_never_asked_goes_first() -> None:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(site(max_connections=3))
        old, old_w = await stack.enter_async_context(here.connection())
        old_w.write(GET)
        await answered(old)
        silent, _ = await stack.enter_async_context(here.connection())
        busy, busy_w = await stack.enter_async_context(here.connection())
        busy_w.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: here.num_asked == 2)
        async with here.connection() as (new, new_w):
            assert await ended(silent) == b"", "it never asked anything"
            await here.pass_time(0.5)
            new_w.write(GET)
            await answered(new)
            async with here.connection() as (newer, newer_w):
                assert await ended(old) == b"", "it was idle longest"
                newer_w.write(GET)
                await answered(newer)
        assert here.refused == {Refused.TOO_MANY: 2}
        here.may_answer.set()
        await answered(busy)


@pytest.mark.covers("F98")
async def test_when_all_are_being_answered_the_new_one_is_closed() -> None:
    async with site(max_connections=1) as here, here.connection() as (busy, busy_w):
        busy_w.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: here.num_asked == 1)
        assert await here.ask(GET) == b""
        here.may_answer.set()
        await answered(busy)
        assert here.refused == {Refused.TOO_MANY: 1}


class Uncounted(set[Any]):
    """A set that counts walks through it."""

    num_walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_walks += 1
        return super().__iter__()


async def test_a_connection_beyond_the_most_costs_no_walk_through_the_others() -> None:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(site(max_connections=20))
        connections = here.server.server_state.connections = Uncounted()
        for _ in range(20):
            await stack.enter_async_context(here.connection())
        await eventually(lambda: len(connections) == 20)
        for _ in range(30):
            reader, writer = await stack.enter_async_context(here.connection())
            writer.write(GET)
            await answered(reader)
        assert here.refused == {Refused.TOO_MANY: 30}
        assert connections.num_walks == 0


async def test_connections_that_come_together_close_as_many_as_are_too_many() -> None:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(site(max_connections=5))
        readers = [(await stack.enter_async_context(here.connection()))[0] for _ in range(12)]
        await eventually(lambda: here.refused[Refused.TOO_MANY] == 7)
        await eventually(lambda: sum(reader.at_eof() for reader in readers) >= 7)
        await here.settle()
        assert sum(reader.at_eof() for reader in readers) == 7
        assert here.refused == {Refused.TOO_MANY: 7}
