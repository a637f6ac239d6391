"""Probes, keys, request ids, and the server around it all."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from common.errors import ConfigError
from router.http.server import LIMITS, bind_http, serve_http
from tests.support.http.http_edge import make_edge
from tests.support.http.http_server import eventually, raw_request, served
from tests.support.http.scripted_generator import hangs_after

TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}


async def test_probes() -> None:
    edge = make_edge()
    async with edge.client() as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"status": "ready"}
        edge.cluster.wrong = ("p1 can hand nothing off",)
        answer = (await client.get("/ready")).json()
        assert answer == {"status": "ready", "warnings": ["p1 can hand nothing off"]}
        edge.cluster.reason = "no decode node"
        response = await client.get("/ready")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["reason"] == "no decode node"
        assert (await client.get("/health")).status_code == 200
        described = (await client.get("/v1/cluster")).json()
        assert described.pop("serving") == {**edge.live.serving(), "uptime_s": ANY}
        assert described == {"nodes": [], "router": "r0"}
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
        assert (await client.get("/v1/models/tiny")).json() == card
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "pdserve_requests_in_progress 0.0" in metrics.text


async def test_a_broken_cluster_view_is_a_500_in_shape() -> None:
    edge = make_edge()

    def describe() -> dict[str, Any]:
        raise KeyError("secret")

    edge.cluster.describe = describe  # type: ignore[method-assign]
    async with edge.client() as client:
        response = await client.get("/v1/cluster")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_the_description_stands_alone() -> None:
    async with make_edge().client() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        page = (await client.get("/docs")).text
        loaded = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert len(loaded) == 3
        for part in loaded:
            assert part.startswith("/docs/")
            response = await client.get(part)
            assert response.status_code == 200
            assert len(response.content) > 500
        assert "//" not in re.sub(r"(?m)<!--.*?-->|^\s*//.*$", "", page)
        assert (await client.get("/docs/../pyproject.toml")).status_code == 404
        other = await client.get("/docs/other.js")
        assert other.status_code == 404
        assert "no such part: wanted one of swagger-ui" in other.json()["error"]["message"]
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert "messages" in schema["schema"]["properties"]
    assert "$ref" not in str(paths["/v1/chat/completions"]["post"]["requestBody"])


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Basic k€y", 401),
        ("k€y", 401),
        ("Bearer k€y", 200),
        ("bearer  k€y", 200),
    ],
)
async def test_the_api_key(header: str | None, status: int) -> None:
    edge = make_edge(api_key="k€y")
    headers = {} if header is None else {"authorization": header.encode()}
    async with edge.client() as client:
        response = await client.post("/v1/completions", json=TEXT, headers=headers)  # type: ignore[arg-type]
        assert response.status_code == status
        for path in ("/v1/models", "/v1/cluster"):
            assert (await client.get(path, headers=headers)).status_code == status  # type: ignore[arg-type]
        assert (await client.get("/metrics", headers=headers)).status_code == status  # type: ignore[arg-type]
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/nothing")).status_code == 401
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in response.headers
        assert edge.generator.calls == []


async def test_request_ids() -> None:
    async with make_edge().client() as client:
        mine = await client.get("/health", headers={"x-request-id": "abc-1"})
        assert mine.headers["x-request-id"] == "abc-1"
        made = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
        assert made[0] != made[1]
        for bad in ("x" * 129, "a b", ""):
            response = await client.get("/health", headers={"x-request-id": bad})
            assert response.headers["x-request-id"].startswith("req-")
        streamed = await client.post(
            "/v1/completions", json=TEXT | {"stream": True}, headers={"x-request-id": "abc-2"}
        )
        assert streamed.headers["x-request-id"] == "abc-2"
        missing = await client.get("/nothing", headers={"x-request-id": "abc-3"})
        assert missing.headers["x-request-id"] == "abc-3"


def test_a_port_in_use_is_named() -> None:
    with bind_http("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*in use"):
            bind_http("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.1", "not a host"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:0"):
        bind_http(host, 0)


async def test_stopping_frees_the_port_and_lets_requests_end() -> None:
    edge = make_edge()
    async with served(edge.app) as port, httpx.AsyncClient(timeout=60) as client:
        response = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=TEXT)
        assert response.status_code == 200
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_stopping_cancels_what_does_not_end() -> None:
    edge = make_edge(hangs_after())
    body = b'{"model": "tiny", "prompt": "Hi"}'
    listener, stop = bind_http("127.0.0.1", 0), asyncio.Event()
    port = listener.getsockname()[1]
    serving = asyncio.create_task(serve_http(edge.app, listener, stop=stop, grace_s=1.0))
    async with raw_request(port, "/v1/completions", body):
        await eventually(lambda: edge.generator.calls)
        stop.set()
        async with asyncio.timeout(60):
            await serving
    assert edge.generator.calls[0].closed.is_set()
    outcome = {"endpoint": "completions", "outcome": "cancelled"}
    assert edge.metric("pdserve_requests_total", **outcome) == 1


async def test_a_20_mb_body_is_refused_over_a_socket_and_the_connection_lives() -> None:
    edge = make_edge()
    async with served(edge.app) as port, httpx.AsyncClient(timeout=60) as client:
        url = f"http://127.0.0.1:{port}/v1/completions"
        response = await client.post(url, content=b"x" * (20 << 20))
        assert response.status_code == 413
        assert "10485760 bytes" in response.json()["error"]["message"]
        assert (await client.post(url, json=TEXT)).status_code == 200


@pytest.mark.covers("W01")
@pytest.mark.parametrize("offer", ["h2c", "websocket"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_offered_upgrade_is_ignored(offer: str, is_stream: bool) -> None:
    edge = make_edge()
    body = json.dumps(TEXT | {"stream": is_stream}).encode()
    headers = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}\r\nHTTP2-Settings: AA\r\n"
    async with (
        served(edge.app) as port,
        raw_request(port, "/v1/completions", body, headers=headers) as (reader, _),
    ):
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        async with asyncio.timeout(30):
            await reader.readuntil(b'"finish_reason":"')


@pytest.mark.covers("W09")
@pytest.mark.parametrize(
    ("keeper", "kept_s"),
    [("Go's proxies", 90), ("reqwest", 90), ("Caddy", 120), ("Google's load balancers", 600)],
)
def test_idle_connections_are_kept_for_longer_than_others_keep_them(
    keeper: str, kept_s: int
) -> None:
    """A request on a connection that the router closes at that moment would fail: status 502."""
    assert LIMITS.idle_timeout_s > kept_s, keeper


@pytest.mark.covers("W14")
@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/messages", "/v1/messages"),
        ("/responses", "/v1/responses"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/openai/v1/responses", "/v1/responses"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/messages/", "/v1/messages"),
        ("/chat/completions/", "/v1/chat/completions"),
        ("/health/", "/health"),
        ("/v1/embeddings", None),
        ("/v1", None),
        ("/v1/", None),
        ("/api/tags", None),
        ("/chatcompletions", None),
    ],
)
async def test_a_path_that_is_like_one_of_an_endpoint_is_told_that_one(
    path: str, meant: str | None
) -> None:
    async with make_edge().client() as client:
        for method in ("GET", "POST"):
            reply = await client.request(method, path, json={"messages": []})
            message = reply.json()["error"]["message"]
            hint = f": wanted {meant}" if meant else ""
            assert (reply.status_code, message) == (404, f"{method} {path}: Not Found{hint}")
