"""Streams whose first token is awaited (W06): the status comes before it, and pings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import NodeLost, Overloaded
from router.api.answers.answer import PING_S
from router.core.generation import TokenChunk
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.http.edge_model import tiny_model
from tests.support.http.http_edge import Edge, events, make_edge
from tests.support.http.http_server import eventually, raw_request, served
from tests.support.http.scripted_generator import Call, Script, chunks, says

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})
TEXT = ("/v1/completions", {"prompt": "Hi"})
RESPONSES = ("/v1/responses", {"input": "Hi"})
MESSAGE = ("/v1/messages", {"messages": MESSAGES, "max_tokens": 20})
ENDPOINTS = pytest.mark.parametrize(
    ("path", "fields"), [CHAT, TEXT, RESPONSES, MESSAGE], ids=lambda value: str(value)[:20]
)
COMMENT = b": ping\n\n"
PINGS = {MESSAGE[0]: b'event: ping\ndata: {"type":"ping"}\n\n'}
OK = b"HTTP/1.1 200 OK\r\n"
HELLO = tiny_model().encode("Hello", add_special_tokens=False, param="text")


def waits(go_on: asyncio.Event, then: Script, *, is_accepted: bool = True) -> Script:
    """A script that is accepted by a node, and goes on when it may."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        if is_accepted:
            call.accept()
        await go_on.wait()
        async for chunk in then(call):
            yield chunk

    return play


def breaks(error: Exception) -> Script:
    async def play(_: Call) -> AsyncIterator[TokenChunk]:
        raise error
        yield  # type: ignore[unreachable]

    return play


class Waiting:
    """A client that asked, on an event loop whose time stands still."""

    def __init__(self, edge: Edge, time: StoppedTime, reader: asyncio.StreamReader) -> None:
        self.edge = edge
        self.time = time
        self.reader = reader

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def part(self) -> bytes:
        """One chunk of the body; empty where the answer ends."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def rest(self) -> bytes:
        body = b""
        while part := await self.part():
            body += part
        return body

    async def spin(self) -> None:
        """Everything that can run has run."""
        for _ in range(100):
            await asyncio.sleep(0)

    async def has_nothing(self) -> bool:
        await self.spin()
        return not self.reader._buffer  # type: ignore[attr-defined]


@asynccontextmanager
async def asking(
    script: Callable[[asyncio.Event], Script], path: str, fields: dict[str, Any]
) -> AsyncIterator[tuple[Waiting, asyncio.Event]]:
    """Ask for a stream; the block gets the client, and the event that lets the script go on."""
    time, go_on = StoppedTime(), asyncio.Event()
    edge = make_edge(script(go_on), clock=time)
    body = json.dumps({"model": "tiny", "stream": True, **fields}).encode()
    async with served(edge.app) as port, raw_request(port, path, body) as (reader, _):
        await eventually(lambda: edge.generator.calls)
        try:
            yield Waiting(edge, time, reader), go_on
        finally:
            go_on.set()
            time.go_on()  # the server looks now and then whether it is to end


@pytest.mark.covers("W06")
@ENDPOINTS
async def test_the_status_comes_when_a_node_has_accepted_and_pings_while_it_computes(
    path: str, fields: dict[str, Any]
) -> None:
    async with asking(lambda go_on: waits(go_on, says("Hello")), path, fields) as (client, go_on):
        assert (await client.head()).startswith(OK)
        first = b""
        if path == RESPONSES[0]:
            first = await client.part()
            assert [line for line in first.split(b"\n") if line.startswith(b"event")] == [
                b"event: response.created",
                b"event: response.in_progress",
            ]
        assert await client.has_nothing()
        for _ in range(3):
            client.time.advance(PING_S)
            assert await client.part() == PINGS.get(path, COMMENT)
        go_on.set()
        rest = await client.rest()
        # As without the wait: nothing of it is missing, and nothing comes twice.
        assert (first + rest).count(b"response.created") == 2 * (path == RESPONSES[0])
        assert rest.count(b"message_start") == 2 * (path == MESSAGE[0])
        assert b"Hello" in rest
        assert b"ping" not in rest


@pytest.mark.covers("W06")
@ENDPOINTS
async def test_an_error_behind_the_status_is_the_last_event(
    path: str, fields: dict[str, Any]
) -> None:
    gone = breaks(NodeLost("gone"))
    async with asking(lambda go_on: waits(go_on, gone), path, fields) as (client, go_on):
        assert (await client.head()).startswith(OK)
        go_on.set()
        body = await client.rest()
        if path in (CHAT[0], TEXT[0]):
            error, done = events(body)
            assert (error["error"]["code"], done) == ("node_lost", "[DONE]")
        elif path == MESSAGE[0]:
            assert body.startswith(
                b'event: error\ndata: {"type":"error","error":{"type":"api_error"'
            )
        else:
            kinds = [line for line in body.split(b"\n") if line.startswith(b"event")]
            assert kinds[-2:] == [b"event: error", b"event: response.failed"]
            assert len(kinds) == 4
        await eventually(lambda: not client.edge.metric("pdserve_requests_in_progress"))
        name = {CHAT[0]: "chat.completions"}.get(path, path.removeprefix("/v1/"))
        failed = {"endpoint": name, "outcome": "node_lost"}
        assert client.edge.metric("pdserve_requests_total", **failed) == 1


@pytest.mark.covers("W06")
@ENDPOINTS
async def test_a_refusal_before_a_node_has_accepted_is_a_status(
    path: str, fields: dict[str, Any]
) -> None:
    full = breaks(Overloaded("full", retry_after_s=7.0))
    script = lambda go_on: waits(go_on, full, is_accepted=False)  # noqa: E731
    async with asking(script, path, fields) as (client, go_on):
        client.time.advance(3 * PING_S)
        assert await client.has_nothing(), "no node has accepted it"
        go_on.set()
        head = await client.head()
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 7" in head


async def test_an_error_that_comes_together_with_the_acceptance_is_a_status() -> None:
    def script(_: asyncio.Event) -> Script:
        async def play(call: Call) -> AsyncIterator[TokenChunk]:
            call.accept()
            raise NodeLost("gone")
            yield  # type: ignore[unreachable]

        return play

    async with asking(script, *TEXT) as (client, _):
        assert (await client.head()).startswith(b"HTTP/1.1 502")


async def test_the_status_of_several_choices_waits_for_all_of_them_or_a_token() -> None:
    fields = TEXT[1] | {"n": 3}
    script = lambda go_on: waits(go_on, says("Hello"), is_accepted=False)  # noqa: E731
    for has_token in (False, True):
        async with asking(script, TEXT[0], fields) as (client, go_on):
            calls = client.edge.generator.calls
            await eventually(lambda calls=calls: len(calls) == 3)  # type: ignore[misc]
            calls[2].accept()
            calls[0].accept()
            assert await client.has_nothing()
            if has_token:
                go_on.set()
            else:
                calls[1].accept()
            assert (await client.head()).startswith(OK)


async def test_a_ping_comes_only_where_nothing_else_does() -> None:
    """A token that shows nothing yet, as a part of a stop string, is nothing."""
    tokens: asyncio.Queue[int] = asyncio.Queue()
    told = iter(range(9))

    def script(_: asyncio.Event) -> Script:
        async def play(call: Call) -> AsyncIterator[TokenChunk]:
            call.accept()
            while True:
                yield TokenChunk(first_index=next(told), token_ids=(await tokens.get(),))

        return play

    fields = TEXT[1] | {"stop": ["Hello Hello"]}
    (a_word,) = tiny_model().encode(" the", add_special_tokens=False, param="text")
    async with asking(script, TEXT[0], fields) as (client, _):
        await client.head()
        client.time.advance(0.9 * PING_S)
        tokens.put_nowait(a_word)
        assert b" the" in await client.part()
        client.time.advance(0.2 * PING_S)
        assert await client.has_nothing(), "a token came in this time"
        client.time.advance(0.9 * PING_S)
        tokens.put_nowait(HELLO[0])
        client.time.advance(0.1 * PING_S)
        assert await client.part() == COMMENT
        assert await client.has_nothing()


@pytest.mark.covers("W06")
async def test_a_client_of_http_1_0_gets_pings() -> None:
    time, go_on = StoppedTime(), asyncio.Event()
    edge = make_edge(waits(go_on, says("Hello")), clock=time)
    body = json.dumps({"model": "tiny", "stream": True, **TEXT[1]}).encode()
    async with served(edge.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        length = f"Content-Length: {len(body)}\r\n\r\n"
        writer.write(f"POST {TEXT[0]} HTTP/1.0\r\nHost: localhost\r\n{length}".encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(2):
            time.advance(PING_S)
            assert await reader.readuntil(b"\n\n") == COMMENT
        go_on.set()
        assert (await reader.read()).endswith(b"data: [DONE]\n\n")
        writer.close()
        time.go_on()


async def test_an_answer_that_is_not_streamed_has_no_status_before_its_end() -> None:
    fields = TEXT[1] | {"stream": False}
    async with asking(lambda go_on: waits(go_on, says("Hello")), TEXT[0], fields) as (
        client,
        go_on,
    ):
        client.time.advance(3 * PING_S)
        assert await client.has_nothing()
        go_on.set()
        assert (await client.head()).startswith(OK)


async def test_a_stream_that_is_over_sends_no_pings() -> None:
    """Its connection may carry the next request."""
    async with asking(lambda go_on: waits(go_on, says("Hello")), *CHAT) as (client, go_on):
        await client.head()
        go_on.set()
        assert (await client.rest()).endswith(b"data: [DONE]\n\n")
        for _ in range(3):
            client.time.advance(PING_S)
            assert await client.has_nothing()


@pytest.mark.covers("T20")
async def test_the_tokens_of_a_prompt_are_told_with_the_first_token() -> None:
    """`message_start` says how many of them were in a cache, which nobody knows before."""
    said = chunks(HELLO, num_cached=4)

    async def play(_: Call) -> AsyncIterator[TokenChunk]:
        for chunk in said:
            yield chunk

    async with asking(lambda go_on: waits(go_on, play), *MESSAGE) as (client, go_on):
        await client.head()
        go_on.set()
        start = json.loads((await client.rest()).split(b"\n")[1].removeprefix(b"data: "))
        assert start["message"]["usage"]["cache_read_input_tokens"] == 4
