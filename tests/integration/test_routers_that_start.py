"""A router that has just begun knows its nodes before it answers anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from common.nodes import Role
from protos import pdserve_node_pb2 as pb
from router.dispatch import node_pool
from router.dispatch.dispatcher import Dispatcher
from tests.integration.fake_node import FakeNode
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_server import eventually
from tests.support.nodes.node_views import placing
from tests.support.stores.memory_store import MemoryStore

LEASE_S = 5.0


class SlowToSpeak(FakeNode):
    """Says its first word when `may_speak` is set."""

    def __init__(self, node_id: str) -> None:
        super().__init__(node_id, Role.DECODE)
        self.is_asked = asyncio.Event()
        self.may_speak = asyncio.Event()

    async def Stream(self, messages: object, context: object) -> AsyncIterator[pb.NodeMessage]:  # noqa: N802
        self.is_asked.set()
        await self.may_speak.wait()
        async for message in super().Stream(messages, context):
            yield message


class World:
    """Decode nodes that are listed, and a router that begins."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.nodes: list[SlowToSpeak] = []
        self.router = Dispatcher(
            self.store,
            placing("round_robin", lease_s=LEASE_S),
            router_id="router-0",
            registry=CollectorRegistry(),
            on_failed=lambda: None,
            clock=self.clock,
        )
        self.never = asyncio.Event()

    async def begin(self) -> asyncio.Task[None]:
        """The task that ends when the router has met its nodes."""
        for node_id in ("d0", "d1"):
            node = SlowToSpeak(node_id)
            await node.start(self.store)
            self.nodes.append(node)
        await self.router.start()
        meeting = asyncio.create_task(self.router.pool.wait_for_nodes(self.never))
        for node in self.nodes:
            await node.is_asked.wait()
        return meeting


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(node_pool, "LOSS_S", 600.0)
    monkeypatch.setattr(node_pool, "TICK_S", 600.0)  # Its nodes send no heartbeats.
    world = World()
    yield world
    await world.router.close()
    for node in world.nodes:
        await node.die()
    await world.store.close()


@pytest.mark.covers("F119")
async def test_it_waits_for_the_first_word_of_every_node(world: World) -> None:
    meeting = await world.begin()
    world.nodes[0].may_speak.set()
    await eventually(world.router.pool.nodes)
    assert not meeting.done()
    world.nodes[1].may_speak.set()
    await meeting
    assert len(world.router.pool.nodes()) == 2


async def test_it_does_not_wait_where_there_are_no_nodes(world: World) -> None:
    await world.router.start()
    await world.router.pool.wait_for_nodes(world.never)
    assert not world.router.pool.nodes()


async def test_a_node_that_leaves_without_a_word_is_not_waited_for(world: World) -> None:
    meeting = await world.begin()
    world.nodes[0].may_speak.set()
    await world.store.leave(world.nodes[1].incarnation)
    for _ in range(round(LEASE_S) + 1):
        assert not meeting.done()
        world.clock.advance(1.0)
        await world.router.pool.refresh(world.router.incarnation)
    await meeting


@pytest.mark.covers("F91")
async def test_a_node_that_stays_silent_is_waited_for_until_it_would_be_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pool, "LOSS_S", 0.05)
    await (await world.begin())
    assert not world.router.pool.nodes()


async def test_a_process_that_is_told_to_end_waits_for_nobody(world: World) -> None:
    meeting = await world.begin()
    world.never.set()
    await meeting
    assert not world.router.pool.nodes()
