"""A router that leaves: what it says, what it finishes, when its connections end."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvloop

from common.ids import Incarnation
from http_serving.server import Server
from router.access.api_key_book import ApiKeyBook
from router.access.api_keys import add_api_key
from router.cluster.drain import DrainingNode
from router.core.generation import TokenChunk
from router.http import server as server_module
from router.http.server import bind_http, serve_http
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.http_server import eventually, raw_request
from tests.support.http.scripted_generator import Call, chunks, hangs_after, says

BODY = b'{"model": "tiny", "prompt": "Hi", "max_tokens": 200, "stream": true}'
PATH = "/v1/completions"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
JSON = {"content-type": "application/json"}
WAIT_S = 20.0
NUM_LAST = 20


class Serving:
    """A router's edge on a port, with both ways to end it."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.stop, self.drain = asyncio.Event(), asyncio.Event()
        self.listener = bind_http("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.task: asyncio.Task[None] | None = None

    async def ends(self) -> None:
        assert self.task is not None
        async with asyncio.timeout(WAIT_S):
            await self.task

    def is_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@asynccontextmanager
async def serving(edge: Edge, drain_timeout_s: float = 1000.0) -> AsyncIterator[Serving]:
    one = Serving(edge)
    one.task = asyncio.create_task(
        serve_http(
            edge.app,
            one.listener,
            stop=one.stop,
            drain=one.drain,
            drain_timeout_s=drain_timeout_s,
            grace_s=1.0,
        )
    )
    try:
        yield one
    finally:
        one.stop.set()
        await one.ends()


async def test_a_stream_goes_on_to_its_end_and_then_its_connection_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "LINGER_S", 0.01)
    may_go_on = asyncio.Event()

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        async for chunk in says("Hello world")(call):
            yield chunk
            await may_go_on.wait()

    async with serving(make_edge(play)) as router:
        async with raw_request(router.port, PATH, BODY) as (reader, _):
            await reader.readuntil(b"data: ")
            router.drain.set()
            await eventually(lambda: not router.is_open())
            assert router.task is not None
            assert not router.task.done()
            may_go_on.set()
            rest = await reader.read()
            assert b"data: [DONE]" in rest
        await router.ends()


async def test_an_idle_router_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(make_edge(), drain_timeout_s=20.0) as router:
        router.drain.set()
        await router.ends()
        assert not router.is_open()
    # In the words that nodes use.
    begin, end = "draining: running requests have 20 s to finish", "drained: nothing is left"
    assert [line for line in caplog.messages if "drain" in line] == [begin, end]


async def who_connected_last_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several connections lie in the kernel's queue, requests sent, when the door is closed."""
    close_the_door = Server.stop_accepting
    clients: list[socket.socket] = []

    async def connect_and_close(server: Server, listener: socket.socket) -> None:
        # The loop has no turn between this and the closing, and cannot take them before.
        for _ in range(NUM_LAST):
            clients.append(socket.create_connection(("127.0.0.1", router.port)))
            clients[-1].sendall(GET)
        # Who has hung up already is nobody's trouble.
        clients.pop(0).close()
        clients[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        clients.pop(0).close()
        await close_the_door(server, listener)

    monkeypatch.setattr(Server, "stop_accepting", connect_and_close)
    async with serving(make_edge()) as router:
        router.drain.set()
        await router.ends()
        assert not router.is_open()
        assert len(clients) == NUM_LAST - 2
        for client in clients:
            client.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=client)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert b"connection: close" in answer
            writer.close()


async def test_a_client_that_connected_before_the_port_closed_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await who_connected_last_is_answered(monkeypatch)


def test_a_client_that_connected_before_the_port_closed_is_answered_on_the_fast_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uvloop.run(who_connected_last_is_answered(monkeypatch))


async def test_a_router_that_is_told_to_drain_before_it_serves_ends() -> None:
    router = Serving(make_edge())
    router.drain.set()
    async with asyncio.timeout(WAIT_S):
        await serve_http(
            router.edge.app,
            router.listener,
            stop=router.stop,
            drain=router.drain,
            drain_timeout_s=1000.0,
        )
    assert not router.is_open()


async def test_a_kept_connection_is_answered_once_more_and_told_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "LINGER_S", WAIT_S)
    async with serving(make_edge()) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(GET)
        first = await reader.readuntil(b'{"status":"ok"}')
        assert b"connection: close" not in first
        router.drain.set()
        await eventually(lambda: not router.is_open())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await reader.read(1)  # it is not closed under a request that is on its way
        writer.write(GET)
        last = await reader.read()
        assert b"connection: close" in last
        assert last.endswith(b'{"status":"ok"}')
        writer.close()


async def test_a_kept_connection_without_a_request_is_closed() -> None:
    async with serving(make_edge()) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(GET)
        await reader.readuntil(b'{"status":"ok"}')
        router.drain.set()
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        await router.ends()
        writer.close()


@pytest.mark.parametrize("is_told_to_stop", [False, True])
async def test_what_does_not_end_is_cancelled_at_the_time_out_or_the_second_signal(
    is_told_to_stop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    edge = make_edge(hangs_after(chunks([65, 66])[:1]))
    timeout_s = 1000.0 if is_told_to_stop else 0.0
    async with (
        serving(edge, drain_timeout_s=timeout_s) as router,
        raw_request(router.port, PATH, BODY) as (reader, _),
    ):
        await reader.readuntil(b"data: ")
        router.drain.set()
        if is_told_to_stop:
            await eventually(lambda: not router.is_open())
            assert not edge.generator.calls[0].closed.is_set()
            router.stop.set()
        await router.ends()
        async with asyncio.timeout(WAIT_S):
            await edge.generator.calls[0].closed.wait()
            rest = await reader.read()
    *_, last, end = rest.decode().split("data: ")
    assert '"message":"the router is shutting down: send the request again"' in last
    assert '"code":"overloaded"' in last
    assert end.startswith("[DONE]")
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]
    assert "cancelled 1 requests that were in progress at the end" in caplog.messages
    assert not [line for line in caplog.messages if line.startswith("drained")]


async def test_a_client_that_still_waits_for_a_whole_answer_is_told_to_come_back() -> None:
    edge = make_edge(hangs_after(chunks([65, 66])[:1]))
    whole = BODY.replace(b'"stream": true', b'"stream": false')
    async with (
        serving(edge, drain_timeout_s=0.0) as router,
        raw_request(router.port, PATH, whole) as (reader, _),
    ):
        await eventually(lambda: edge.generator.calls)
        router.drain.set()
        await router.ends()
        async with asyncio.timeout(WAIT_S):
            reply = (await reader.read()).decode()
    assert reply.startswith("HTTP/1.1 503 ")
    assert "retry-after: 1\r\n" in reply
    assert "the router is shutting down" in reply
    assert edge.metric("pdserve_requests_total", endpoint="completions", outcome="cancelled") == 1


@pytest.mark.covers("T21")
async def test_probes_tell_a_router_that_drains_from_one_that_lives() -> None:
    edge = make_edge()
    edge.cluster.reason = "draining"
    async with edge.client() as client:
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        assert (await client.get("/health")).status_code == 200
        # What reached it before everybody knew is answered all the same.
        answer = await client.post(PATH, json={"model": "tiny", "prompt": "Hi"})
        assert answer.status_code == 200


async def ask(edge: Edge, **body: object) -> httpx.Response:
    async with edge.client() as client:
        return await client.post("/v1/cluster/drain", json=body)


async def test_a_node_that_nobody_knows_is_not_found() -> None:
    response = await ask(make_edge(), node_id="decode-9")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "node_not_found"
    assert error["param"] == "node_id"
    assert "there is no node 'decode-9'" in error["message"]


@pytest.mark.parametrize("body", [{}, {"node_id": ""}, {"node_id": 7}, {"node": "a"}])
async def test_a_drain_of_nobody_is_a_bad_request(body: dict[str, object]) -> None:
    response = await ask(make_edge(), **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "node_id"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 4000])
async def test_a_drain_without_json_is_a_bad_request(body: bytes) -> None:
    async with make_edge().client() as client:
        response = await client.post("/v1/cluster/drain", content=body, headers=JSON)
        assert response.status_code == 400
        too_long = await client.post("/v1/cluster/drain", content=b" " * 5000, headers=JSON)
        assert too_long.status_code == 413


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_drain_that_a_form_could_send_is_refused(kind: str) -> None:
    async with make_edge().client() as client:
        response = await client.post(
            "/v1/cluster/drain", content=b'{"node_id": "decode-1"}', headers={"content-type": kind}
        )
        assert response.status_code == 415
        assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_the_log_names_the_client_that_asked_for_a_drain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def drain(node_id: str) -> DrainingNode:
        return DrainingNode(Incarnation(node_id, 3), 30.0)

    path = tmp_path / "keys.json"
    key = add_api_key(path, "night-shift", is_admin=True)
    edge = make_edge(keys=ApiKeyBook(ManualClock(), path=path), drain_node=drain)
    headers = {"authorization": f"Bearer {key}", "x-request-id": "req-7"}
    with caplog.at_level("INFO", logger="pdserve.router.nodes"):
        async with edge.client(headers=headers) as client:
            body = {"node_id": "decode-1"}
            assert (await client.post("/v1/cluster/drain", json=body)).status_code == 200
    (line,) = [message for message in caplog.messages if "asked to drain" in message]
    assert "decode-1" in line
    assert "the key 'night-shift', request req-7 from 127.0.0.1" in line
    assert key not in line


async def test_an_open_api_drains_nothing_without_an_administrators_key(tmp_path: Path) -> None:
    drained = []

    async def drain(node_id: str) -> DrainingNode:
        drained.append(node_id)
        return DrainingNode(Incarnation(node_id, 3), 30.0)

    path = tmp_path / "keys.json"
    client_key, key = add_api_key(path, "client"), add_api_key(path, "admin", is_admin=True)
    edge = make_edge(keys=ApiKeyBook(ManualClock(), path=path, open_api=True), drain_node=drain)
    async with edge.client() as client:
        for given in ("", "pds_wrong", client_key):
            headers = {"authorization": f"Bearer {given}"} if given else {}
            response = await client.post(
                "/v1/cluster/drain", json={"node_id": "decode-1"}, headers=headers
            )
            assert (response.status_code, drained) == (403, [])
            assert response.json()["error"]["code"] == "not_admin"
            assert "private/keys/client/admin.key" in response.text
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        headers = {"authorization": f"Bearer {key}"}
        body = {"node_id": "decode-1"}
        response = await client.post("/v1/cluster/drain", json=body, headers=headers)
        assert (response.status_code, drained) == (200, ["decode-1"])


async def test_why_nothing_drains_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    await ask(make_edge(), node_id="decode-9")
    (line,) = [message for message in caplog.messages if message.startswith("no `drain NODE`")]
    assert "a client without a key" in line
    assert "404, there is no node 'decode-9'" in line
