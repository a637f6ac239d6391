"""A router reaches its nodes directly."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from pdserve.local_cluster.free_ports import free_loopback_port
from protos.transport_security import open_channel
from router.dispatch.client.node_clients import CHANNEL_OPTIONS


@pytest.mark.covers("M02")
async def test_a_proxy_that_the_environment_names_is_not_asked_for_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_loopback_port()}")
    try:
        async with open_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS, None) as channel:
            async with asyncio.timeout(60):
                await channel.channel_ready()
    finally:
        await server.stop(None)
