"""The probes of a node from its start to its end: alive throughout, ready only while it serves."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import httpx
import pytest

from common.errors import StaleEpoch
from node.life import engine_node
from pdserve.local_cluster.free_ports import free_loopback_port
from protos import pdserve_node_pb2 as pb
from tests.support.http.http_server import eventually
from tests.support.nodes.drained_node import World, ends, rest_of


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


async def test_a_drained_node_may_stay_alive_until_it_is_told_to_end() -> None:
    port = free_loopback_port()
    world = World(timeout_s=600.0, metrics_port=port, stay_drained=True)
    async with world.running() as serving:
        caller = await world.start_answer()
        await world.stub.Drain(pb.DrainRequest(envelope=world.envelope))
        world.runner.let_go_on()
        await rest_of(caller)
        async with asyncio.timeout(60):
            while await probe(port, "/ready") != (503, "drained"):
                pass
        assert await world.store.live_nodes() == []
        assert await probe(port, "/health") == (200, None)
        assert not serving.done()
        world.told_to_end.set()
        assert await ends(serving) == 0


@pytest.mark.parametrize("how", ["SIGTERM", "not stay_drained"])
async def test_a_node_that_is_told_to_end_or_may_not_stay_ends_when_it_is_drained(how: str) -> None:
    world = World(timeout_s=600.0, stay_drained=how == "SIGTERM")
    async with world.running() as serving:
        if how == "SIGTERM":
            world.told_to_end.set()
        world.drain.set()
        assert await ends(serving) == 0


async def test_a_draining_node_that_loses_its_lease_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_node, "STEP_GRACE_S", 0.05)
    world = World(timeout_s=600.0, stay_drained=True)

    async def refuse(*_: object, **__: object) -> NoReturn:
        raise StaleEpoch("another process took over")

    async with world.running() as serving:
        await world.start_answer()  # one that waits for its next step
        monkeypatch.setattr(world.store, "heartbeat", refuse)
        world.drain.set()
        assert await ends(serving) == 1
