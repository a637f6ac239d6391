"""The metrics port of a node: who may read what, and who cannot keep Prometheus out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from common.errors import ConfigError
from node.watch.metrics_server import LIMITS, MetricsServer, bind_metrics
from tests.support.http.other_paths import WAYS


@asynccontextmanager
async def serving(
    token: str = "", why_not_ready: Callable[[], str] = lambda: ""
) -> AsyncIterator[int]:
    registry = CollectorRegistry()
    Counter("tests", "Tests.", registry=registry).inc()
    listener = bind_metrics("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    server = MetricsServer(registry, listener, why_not_ready, token=token)
    server.start()
    try:
        yield port
    finally:
        await server.stop()


async def get(
    port: int, authorization: str | None = None, path: str = "/metrics"
) -> httpx.Response:
    headers = {} if authorization is None else {"authorization": authorization}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://127.0.0.1:{port}{path}", headers=headers)


async def test_without_a_token_everybody_reads() -> None:
    async with serving() as port:
        for authorization in (None, "Bearer x"):
            reply = await get(port, authorization)
            assert (reply.status_code, "tests_total 1.0" in reply.text) == (200, True)


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer toke", "Bearer tokens", "token", "Basic token"],
)
async def test_with_one_only_its_bearer_does(authorization: str | None) -> None:
    async with serving("token") as port:
        refused = await get(port, authorization)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert "tests_total" not in refused.text
        assert (await get(port, "Bearer token")).status_code == 200


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Bearer token"])
async def test_probes_need_no_token(authorization: str | None) -> None:
    reasons = ["loading the model", "", "draining"]
    async with serving("token", lambda: reasons[0]) as port:
        answers = []
        while reasons:
            alive = await get(port, authorization, "/health")
            assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
            reply = await get(port, authorization, "/ready")
            answers.append((reply.status_code, reply.json()))
            reasons.pop(0)
        reasons.append("")
    assert answers == [
        (503, {"status": "not ready", "reason": "loading the model"}),
        (200, {"status": "ready"}),
        (503, {"status": "not ready", "reason": "draining"}),
    ]


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer token"])
async def test_the_token_is_wanted_however_a_path_is_written(given: str | None) -> None:
    reads = "" if given is None else f"Authorization: {given}\r\n"

    async def ask(port: int, method: str, target: str) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{reads}\r\n"
        async with asyncio.timeout(60):
            writer.write(head.encode("latin-1"))
            answer = await reader.read()
        writer.close()
        return int(answer.split()[1]), answer

    async with serving("token") as port:
        for path in ("/metrics", "/health", "/ready"):
            plain, _ = await ask(port, "GET", path)
            targets = [("GET", way(path)) for way in WAYS.values()]
            for method, target in [*targets, ("HEAD", path), ("OPTIONS", path), ("POST", path)]:
                status, answer = await ask(port, method, target)
                assert status in (plain, 400, 404, 405), (method, target)
                assert given == "Bearer token" or b"tests_total" not in answer, (method, target)


async def test_a_path_that_is_not_plain_is_refused_in_words() -> None:
    async with serving("token") as port:
        for path, words in (("/metrics%0A", "cannot be shown"), ("/health%2F", "slash")):
            refused = await get(port, "Bearer token", path)
            assert (refused.status_code, words in refused.text) == (400, True)
        assert (await get(port, None, "/metrics/")).status_code == 404


@pytest.mark.covers("W07")
async def test_a_half_closed_client_is_answered_by_a_node() -> None:
    async with serving("token") as port:
        for version in ("1.0", "1.1"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /health HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
            writer.write_eof()
            assert b"HTTP/1.1 200 OK" in await reader.read()
            writer.close()


async def test_idle_and_silent_connections_do_not_keep_prometheus_out() -> None:
    async with serving("token") as port:
        silent = [
            await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2 * LIMITS.max_connections)
        ]
        async with httpx.AsyncClient(trust_env=False) as idle:
            url = f"http://127.0.0.1:{port}/metrics"
            assert (await idle.get(url)).status_code == 401
            assert (await get(port, "Bearer token")).status_code == 200
        for _, writer in silent:
            writer.close()


def test_a_port_in_use_is_named() -> None:
    with bind_metrics("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"listen for metrics on 127.0.0.1:{port}: .*in use"):
            bind_metrics("127.0.0.1", port)


@pytest.mark.covers("W01")
async def test_an_offered_upgrade_is_ignored_by_a_node() -> None:
    async with serving() as port:
        for offer in ("h2c", "websocket"):
            headers = {"connection": "Upgrade", "upgrade": offer}
            async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
                for path in ("/health", "/metrics"):
                    url = f"http://127.0.0.1:{port}{path}"
                    reply = await client.request("GET", url, content=b"GET / HTTP/1.1\r\n\r\n")
                    assert reply.status_code == 200
