"""The probes of a node from its start to its end: alive throughout, ready only while it serves."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from pdserve.local_cluster.free_ports import free_loopback_port
from tests.fakes.http_server import eventually
from tests.unit.node.test_node_drain import World, ends


async def probe(port: int, path: str) -> tuple[int, Any]:
    async with httpx.AsyncClient(trust_env=False) as client:
        reply = await client.get(f"http://127.0.0.1:{port}{path}")
    return reply.status_code, reply.json().get("reason") if path == "/ready" else None


async def test_a_node_is_alive_while_it_loads_and_ready_when_it_serves() -> None:
    port = free_loopback_port()
    world = World(timeout_s=600.0, metrics_port=port)
    world.may_load.clear()
    serving = world.start()
    try:
        assert await asyncio.to_thread(world.loading.wait, 60)
        assert await probe(port, "/health") == (200, None)
        assert await probe(port, "/ready") == (503, "loading the model")
        async with httpx.AsyncClient(trust_env=False) as client:
            metrics = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert metrics.status_code == 200
        assert "pdserve_running_sequences" not in metrics.text
    finally:
        world.stop.set()
        world.may_load.set()
    assert await ends(serving) == 0


async def test_a_draining_node_is_alive_and_not_ready() -> None:
    port = free_loopback_port()
    world = World(timeout_s=600.0, metrics_port=port)
    async with world.running() as serving:
        assert await probe(port, "/ready") == (200, None)
        await world.start_answer()  # one that waits for its next step
        world.drain.set()
        await eventually(world.store.is_announced.is_set)
        assert await probe(port, "/ready") == (503, "draining")
        assert await probe(port, "/health") == (200, None)
        world.runner.let_go_on()
        assert await ends(serving) == 0
