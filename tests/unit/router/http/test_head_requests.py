"""HEAD is answered as GET is, without the body: load balancers probe by it."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.http.http_edge import make_edge
from tests.support.http.http_server import eventually, served

PATHS = ["/", "/health", "/ready", "/v1/models", "/v1/models/tiny", "/version", "/metrics", "/docs"]


@pytest.mark.covers("W04")
@pytest.mark.parametrize("path", [*PATHS, "/openapi.json", "/v1/cluster", "/v1/cluster/targets"])
async def test_head_is_answered_as_get(path: str) -> None:
    async with make_edge(api_key="key").client() as client:
        for key in ("key", "wrong"):
            headers = {"authorization": f"Bearer {key}"}
            whole = await client.get(path, headers=headers)
            head = await client.head(path, headers=headers)
            assert head.status_code == whole.status_code
            assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.covers("W04")
async def test_only_where_get_is() -> None:
    async with make_edge().client() as client:
        for path in ("/v1/chat/completions", "/tokenize", "/v1/cluster/drain"):
            assert (await client.head(path)).status_code == 405
        assert (await client.head("/nothing")).status_code == 404


@pytest.mark.covers("W04")
async def test_a_connection_goes_on_behind_it_and_a_stream_ends() -> None:
    async with served(make_edge().app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for path in ("/health", "/v1/live", "/v1/models"):
            writer.write(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reading = asyncio.create_task(reader.read())
        await eventually(reading.done)
        assert reading.result().count(b"HTTP/1.1 200 OK\r\n") == 4
        assert reading.result().endswith(b'{"status":"ok"}')
        writer.close()
