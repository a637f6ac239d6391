"""Clients that disconnect (F58) or do not read (F88): generators end, memory stays bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from http_serving.abort_connection import offer_abort
from router.api.exchanges import FINAL_EVENT_TIMEOUT_S
from router.core.generation import TokenChunk
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.http.edge_model import tiny_model
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.http_server import eventually, raw_request, served
from tests.support.http.scripted_generator import Call, hangs_after, never_ends, says

PATH = "/v1/completions"
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}
SPINS = 2000
"""Turns of the event loop after which whatever could run has run."""


def body_of(**fields: Any) -> bytes:
    return json.dumps(TEXT | fields).encode()


async def until_called(edge: Edge, n: int) -> None:
    await eventually(lambda: len(edge.generator.calls) == n)


async def all_closed(edge: Edge) -> None:
    async with asyncio.timeout(60):
        for call in edge.generator.calls:
            await call.closed.wait()
    await eventually(lambda: edge.metric("pdserve_requests_in_progress") == 0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_accepted", [True, False])
async def test_leaving_before_the_first_token(n: int, is_stream: bool, is_accepted: bool) -> None:
    edge = make_edge(hangs_after())
    async with served(edge.app) as port:
        async with raw_request(port, PATH, body_of(n=n, stream=is_stream)) as (reader, _):
            await until_called(edge, n)
            assert edge.metric("pdserve_requests_in_progress") == 1
            if is_accepted:
                for call in edge.generator.calls:
                    call.accept()
                if is_stream:
                    await reader.readuntil(b"\r\n\r\n")
        await all_closed(edge)
    outcome = {"endpoint": "completions", "outcome": "client_closed"}
    assert edge.metric("pdserve_requests_total", **outcome) == 1


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_in_the_middle_of_a_stream(n: int) -> None:
    edge = make_edge(never_ends())
    async with served(edge.app) as port:
        async with raw_request(port, PATH, body_of(n=n, stream=True)) as (reader, _):
            await reader.readuntil(b'"text":"x"')
        await all_closed(edge)


@pytest.mark.covers("W07")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_half_closed_client_is_answered(is_stream: bool, version: str) -> None:
    may_answer = asyncio.Event()

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        call.accept()
        await may_answer.wait()
        async for chunk in says("Hello world")(call):
            yield chunk

    edge, body = make_edge(play), body_of(stream=is_stream)
    head = f"POST {PATH} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    async with served(edge.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        writer.write_eof()
        await until_called(edge, 1)
        may_answer.set()
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
    assert b"HTTP/1.1 200 OK" in answer
    assert b" world" in answer
    outcome = {"endpoint": "completions", "outcome": "ok"}
    assert edge.metric("pdserve_requests_total", **outcome) == 1


async def test_leaving_while_the_answer_is_collected() -> None:
    edge = make_edge(never_ends())
    async with served(edge.app) as port:
        async with raw_request(port, PATH, body_of()):
            await until_called(edge, 1)
        await all_closed(edge)


async def test_leaving_while_the_body_is_sent() -> None:
    edge = make_edge()
    outcome = {"endpoint": "completions", "outcome": "client_closed"}
    async with served(edge.app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{".encode()
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: edge.metric("pdserve_requests_total", **outcome))
    assert edge.generator.calls == []


async def test_a_client_that_never_reads_is_dropped_when_it_leaves() -> None:
    """The socket's buffers fill, the answer is kept, and closing the socket ends it."""
    edge = make_edge(never_ends("Hello world, the quick brown fox jumps " * 20))
    async with served(edge.app) as port:
        async with raw_request(port, PATH, body_of(stream=True)):
            await until_called(edge, 1)
            await spin_until_stuck(edge.generator.calls[0])
        await all_closed(edge)


async def spin() -> None:
    for _ in range(SPINS):
        await asyncio.sleep(0)


async def spin_until_stuck(call: Call) -> None:
    """Return when the generator pushed nothing for `SPINS` turns of the loop."""
    async with asyncio.timeout(60):
        seen, turns = -1, 0
        while turns < SPINS:
            turns = turns + 1 if call.num_pushed == seen else 0
            seen = call.num_pushed
            await asyncio.sleep(0)


class StuckClient:
    """ASGI ends of a client that takes `num_taken` messages and then no more."""

    def __init__(self, body: bytes, num_taken: int) -> None:
        self._body: list[bytes] = [body]
        self._num_left = num_taken
        self.gone = asyncio.Event()
        self.is_cut = False

    async def receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self._num_left == 0:
            await asyncio.Event().wait()
        self._num_left -= 1

    def cut(self) -> None:
        self.is_cut = True

    def connect(self, edge: Edge) -> asyncio.Task[None]:
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [],
        }
        offer_abort(scope, self.cut)
        call = edge.app(scope, self.receive, self.send)
        return asyncio.ensure_future(call)


@pytest.mark.parametrize("n", [1, 4])
async def test_what_waits_for_a_client_that_does_not_read_is_bounded(n: int) -> None:
    edge = make_edge(never_ends())
    client = StuckClient(body_of(n=n, stream=True, max_tokens=20), num_taken=3)
    task = client.connect(edge)
    await spin()
    assert not task.done()
    assert [call.num_pushed for call in edge.generator.calls] == [20] * n
    client.gone.set()
    async with asyncio.timeout(60):
        await task
    await all_closed(edge)


async def test_the_deadline_ends_a_client_that_does_not_read() -> None:
    time = StoppedTime()
    edge = make_edge(never_ends(), clock=time, request_timeout_s=60.0)
    client = StuckClient(body_of(stream=True), num_taken=3)
    task = client.connect(edge)
    await until_called(edge, 1)
    await spin_until_stuck(edge.generator.calls[0])
    time.advance(60.0)
    await spin()
    assert edge.generator.calls[0].closed.is_set()
    assert not task.done(), "it may still read the last words"
    time.advance(FINAL_EVENT_TIMEOUT_S)
    await task
    assert client.is_cut, "what was sent would be flushed for ever"
    outcome = {"endpoint": "completions", "outcome": "deadline_exceeded"}
    assert edge.metric("pdserve_requests_total", **outcome) == 1


async def test_a_stop_string_frees_the_nodes_before_the_client_has_read_it() -> None:
    ids = tiny_model().encode("Hello world", add_special_tokens=False, param="text")

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for place, token_id in enumerate(ids):
            yield TokenChunk(first_index=place, token_ids=(token_id,))
        await asyncio.Event().wait()

    edge = make_edge(play)
    client = StuckClient(body_of(stream=True, stop="world"), num_taken=1)
    task = client.connect(edge)
    await until_called(edge, 1)
    async with asyncio.timeout(60):
        await edge.generator.calls[0].closed.wait()
    assert not task.done()
    client.gone.set()
    async with asyncio.timeout(60):
        await task
