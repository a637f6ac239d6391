"""The store on a real Redis Cluster and behind a real Sentinel, while servers die and change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import redis

from common.errors import PlacementUnavailable
from common.ids import Incarnation
from common.nodes import Role
from placement.redis_store import RedisStore
from tests.contract.placement_store.worlds import load, place, placement, record, unplace
from tests.support.stores.redis_topologies import (
    RedisClusterServers,
    WatchedRedis,
    redis_cluster,
    watched_redis,
)

PREFIX = "pdserve:{topologies}:"
CALL_TIMEOUT_S = 60.0
FAILOVER_S = 100.0
"""Seconds are usual; a Sentinel that stood still for two seconds does nothing for 30 s."""
FORGOTTEN_S = 6.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisClusterServers]:
    with redis_cluster() as servers:
        yield servers


@pytest.fixture
def watched() -> Iterator[WatchedRedis]:
    with watched_redis() as servers:
        yield servers


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, "topologies", call_timeout_s=CALL_TIMEOUT_S)
    try:
        yield store
    finally:
        await store.close()


async def whole_life(store: RedisStore) -> None:
    """Everything that nodes and routers ask of a store."""
    epoch = await store.next_epoch("decode-0")
    await store.heartbeat(record(epoch=epoch), load(), lease_s=60)
    await store.heartbeat(record("decode-1"), load(), lease_s=60)
    assert [node.record.node_id for node in await store.live_nodes()] == ["decode-0", "decode-1"]
    prefill = record(epoch=epoch, role=Role.PREFILL)
    assert await store.take_role(prefill, load(), lease_s=60, others=["decode-1"])
    await place(store, placement("req-1"))
    await place(store, placement("req-2"))
    await unplace(store, placement("req-1").attempt)
    assert await store.placements() == [placement("req-2")]
    await unplace(store, placement("req-2").attempt)
    await store.leave(Incarnation("decode-0", epoch))
    await store.leave(Incarnation("decode-1", 1))
    assert await store.live_nodes() == []


async def succeeds_again(call: Callable[[], Awaitable[object]]) -> float:
    """Ask until the store answers, as its users do; return the seconds without an answer."""
    began_at_s = time.monotonic()
    while True:
        try:
            await call()
        except PlacementUnavailable:
            if time.monotonic() - began_at_s > FAILOVER_S:
                raise
            await asyncio.sleep(0.05)
        else:
            return time.monotonic() - began_at_s


async def becomes_replica(server: redis.Redis) -> None:
    ends_at_s = time.monotonic() + FAILOVER_S
    while server.info("replication")["role"] != "slave":
        assert time.monotonic() < ends_at_s
        await asyncio.sleep(0.01)


async def exchange(owner: redis.Redis, replica: redis.Redis) -> None:
    """Give the slots of a living owner to its replica.

    Redis takes the command, and forgets it after 5 s where other owners have not agreed by then.
    """
    for _ in range(round(FAILOVER_S / FORGOTTEN_S)):
        with suppress(redis.ResponseError):  # The replica has become the owner meanwhile.
            replica.execute_command("CLUSTER", "FAILOVER")  # type: ignore[no-untyped-call]
        with suppress(TimeoutError):
            async with asyncio.timeout(FORGOTTEN_S):
                await becomes_replica(owner)
            return
    raise AssertionError(f"no failover within {FAILOVER_S:g} s")


async def test_a_redis_cluster_has_all_keys_in_one_slot(cluster: RedisClusterServers) -> None:
    async with opened(cluster.url) as store:
        await whole_life(store)
        await store.heartbeat(record(), load(), lease_s=60)
        keys = cluster.keys()
        await store.leave(Incarnation("decode-0", 1))
    epochs = [PREFIX + "epoch:" + node_id for node_id in ("decode-0", "decode-1")]
    assert keys == [*epochs, PREFIX + "node:decode-0", PREFIX + "nodes"]


async def test_a_slot_that_moved_is_followed_within_the_call(
    cluster: RedisClusterServers,
) -> None:
    """A failover by hand: the former owner lives and answers MOVED."""
    owner = cluster.owner(PREFIX)
    replica = cluster.replicas[cluster.owners.index(owner)]
    async with opened(cluster.url) as store:
        await store.heartbeat(record(), load(), lease_s=60)
        with replica.client() as client, owner.client() as former:
            await exchange(former, client)
        await store.heartbeat(record("decode-1"), load(), lease_s=60)
        assert len(await store.live_nodes()) == 2
        index = cluster.owners.index(owner)
        cluster.owners[index], cluster.replicas[index] = replica, owner
        await store.leave(Incarnation("decode-0", 1))
        await store.leave(Incarnation("decode-1", 1))


async def test_a_redis_cluster_survives_the_owner_of_the_slot(
    cluster: RedisClusterServers,
) -> None:
    owner = cluster.owner(PREFIX)
    async with opened(cluster.url) as store:
        await store.heartbeat(record(), load(), lease_s=60)
        owner.kill()
        await succeeds_again(lambda: store.heartbeat(record("decode-1"), load(), lease_s=60))
        await succeeds_again(lambda: store.heartbeat(record(), load(), lease_s=60))
        assert len(await store.live_nodes()) == 2
        await whole_life(store)


async def test_sentinels_name_the_server_before_and_after_a_failover(
    watched: WatchedRedis,
) -> None:
    async with opened(watched.url) as store:
        await whole_life(store)
        await store.heartbeat(record(), load(), lease_s=60)
        watched.main.kill()
        await succeeds_again(lambda: store.heartbeat(record(), load(), lease_s=60))
        with watched.replica.client() as client:
            assert client.info("replication")["role"] == "master"
        await store.leave(Incarnation("decode-0", 1))
        await whole_life(store)


@pytest.mark.endurance  # a Sentinel takes ten seconds until it changes the former server
async def test_a_server_that_became_a_replica_is_left_within_the_call(
    watched: WatchedRedis,
) -> None:
    """A failover while both servers live: the former one refuses writes."""
    async with opened(watched.url) as store:
        await store.heartbeat(record(), load(), lease_s=60)
        with watched.main.client() as main:
            watched.fail_over()
            await becomes_replica(main)
        await store.heartbeat(record(), load(), lease_s=60)
        assert len(await store.live_nodes()) == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis+sentinel://127.0.0.1:1,127.0.0.1:2/mymaster", "nobody names the server"),
        ("redis+cluster://127.0.0.1:1", "nobody names the server"),
    ],
)
async def test_without_a_server_that_knows_the_store_is_unavailable(url: str, words: str) -> None:
    async with opened(url) as store:
        with pytest.raises(PlacementUnavailable, match=words):
            await store.live_nodes()


async def test_a_service_that_sentinels_do_not_know_is_named(watched: WatchedRedis) -> None:
    async with opened(watched.url.rpartition("/")[0] + "/other") as store:
        with pytest.raises(PlacementUnavailable, match="a Sentinel knows no service 'other'"):
            await store.live_nodes()


async def test_a_silent_sentinel_delays_nothing(watched: WatchedRedis) -> None:
    release = asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = watched.url.replace("redis+sentinel://", f"redis+sentinel://127.0.0.1:{port},")
    async with opened(url) as store:
        began_at_s = time.monotonic()
        assert await store.live_nodes() == []
        assert time.monotonic() - began_at_s < CALL_TIMEOUT_S
    release.set()
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0)
