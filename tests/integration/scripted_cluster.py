"""A dispatcher over scripted nodes: a store, routers, and what a test asks of them.

No lease and no call of a router runs out here, and no node falls silent, however long the machine
stalls. What a router should learn of the store is read by `refresh`; time in which it hears nothing
is that of `tick`, and a node sends a heartbeat in `beat`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.observing.clock import Clock
from common.request import GenerationRequest, RequestOutput, SamplingParams
from placement.redis_store import RedisStore
from router.core.generation import TokenChunk
from router.dispatch import dispatcher, node_pool
from router.dispatch.client import node_clients
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.node_pool import NodePool
from tests.integration.fake_node import FINGERPRINT, FakeNode
from tests.support.http.read_answer import read
from tests.support.nodes.node_outputs import node_output
from tests.support.nodes.node_views import placing

PROMPT = tuple(range(40))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)

NEVER_S = 600.0
"""Longer than any test."""
LEASE_S = DEADLINE_S = NEVER_S


async def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Let the event loop run until something has happened, for 10 s of its own time at most."""
    for _ in range(5000):
        if is_true():
            return
        await asyncio.sleep(0.002)
    pytest.fail(f"not within 10 s: {what}")


class Cluster:
    """Scripted nodes, one store, and routers over them."""

    def __init__(self, redis_url: str) -> None:
        self.url = redis_url
        self.store = RedisStore(redis_url, "dispatch", call_timeout_s=60.0)
        self.nodes: list[FakeNode] = []
        self.num_heard: Counter[Incarnation] = Counter()
        """How many messages of each node the routers have read."""
        self.routers: list[Dispatcher] = []
        self.registry = CollectorRegistry()
        """What the first router counts."""
        self.failed = asyncio.Event()

    async def add(
        self,
        node_id: str,
        role: Role,
        epoch: int = 1,
        port: int = 0,
        max_model_len: int = 1024,
        fingerprint: str = FINGERPRINT,
    ) -> FakeNode:
        node = FakeNode(node_id, role, epoch, max_model_len)
        node.fingerprint = fingerprint
        await node.start(self.store, port=port)
        self.nodes.append(node)
        return node

    async def router(
        self,
        router_id: str = "router-0",
        policy: str = "round_robin",
        clock: Clock | None = None,
    ) -> Dispatcher:
        """A started router that hears every node there is."""
        router = Dispatcher(
            self.store,
            placing(policy, lease_s=LEASE_S),
            router_id=router_id,
            registry=CollectorRegistry() if self.routers else self.registry,
            on_failed=self.failed.set,
            clock=clock,
        )
        self.routers.append(router)
        await router.start()
        await wait_until(lambda: len(router.pool.nodes()) == len(self.nodes), "all nodes heard")
        return router

    def redis(self) -> Redis:
        """A client of the store's Redis beside the store."""
        return Redis.from_url(self.url)

    async def refresh(self) -> None:
        """Every router asks the store, as it does by itself in a quarter of a lease."""
        for router in self.routers:
            await router.pool.refresh(router.incarnation)

    async def beat(self, node: FakeNode) -> None:
        """The node sends a heartbeat; return when the routers have read it, and all before it."""
        node.push()
        await wait_until(
            lambda: (
                all(stream.empty() for stream in node.streams)
                and self.num_heard[node.incarnation] == node.num_said
            ),
            f"what {node.incarnation} said is read",
        )

    async def close(self) -> None:
        for router in self.routers:
            await router.close()
        for node in self.nodes:
            await node.die()
        await self.store.close()


def tick(router: Dispatcher, node: FakeNode, num_ticks: int) -> None:
    """Time passes in which the router hears nothing of the node."""
    client = router.pool.client(node.incarnation)
    assert client is not None
    for _ in range(num_ticks):
        client.tick()


async def asked(node: FakeNode, num_times: int = 1) -> GenerationRequest:
    await wait_until(lambda: len(node.asked) >= num_times, f"{node.incarnation} asked")
    return node.asked[num_times - 1]


def tokens(attempt: AttemptId, first: int, *ids: int, **more: Any) -> RequestOutput:
    return node_output(attempt, first, ids, **more)


def start(router: Dispatcher, sampling: SamplingParams = GREEDY) -> asyncio.Task[list[TokenChunk]]:
    """Read one whole answer in the background."""
    stream = read(router, PROMPT, sampling, deadline_s=DEADLINE_S)

    async def whole() -> list[TokenChunk]:
        return [chunk async for chunks in stream for chunk in chunks]

    return asyncio.create_task(whole())


def ids(chunks: list[TokenChunk]) -> list[int]:
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    next_index = 0
    for chunk in chunks:
        assert chunk.first_index == next_index
        next_index += len(chunk.token_ids)
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


async def placement_written(cluster: Cluster) -> None:
    """Return when the store has a placement: a router writes it a moment after it was made."""
    await _until_placed(cluster, is_wanted=True)


async def no_placements(cluster: Cluster) -> None:
    """Return when the store has none: a router removes it a moment after its end."""
    await _until_placed(cluster, is_wanted=False)


async def _until_placed(cluster: Cluster, *, is_wanted: bool) -> None:
    for _ in range(5000):
        if bool(await cluster.store.placements()) is is_wanted:
            return
        await asyncio.sleep(0.002)
    pytest.fail(f"not within 10 s: {'a' if is_wanted else 'no'} placement in the store")


@pytest.fixture(name="cluster")
async def scripted_cluster(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    """No node and no router yet."""
    monkeypatch.setattr(dispatcher, "CLOSE_TIMEOUT_S", NEVER_S)
    monkeypatch.setattr(node_clients, "CLOSE_TIMEOUT_S", NEVER_S)
    monkeypatch.setattr(node_pool, "TICK_S", NEVER_S)
    cluster = Cluster(redis_url)
    hear = NodePool.on_heard

    def on_heard(pool: NodePool, node: Incarnation, stuck_s: float, *, is_reached: bool) -> None:
        hear(pool, node, stuck_s, is_reached=is_reached)
        cluster.num_heard[node] += 1

    monkeypatch.setattr(NodePool, "on_heard", on_heard)
    yield cluster
    await cluster.close()
