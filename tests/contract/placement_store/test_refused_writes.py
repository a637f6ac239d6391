"""A real Redis that answers reads and refuses writes: every way in which it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from placement.redis_store import RedisStore
from placement.store import PlacementRefused
from tests.contract.placement_store.worlds import load, place, placement, record, unplace
from tests.redis_server import RedisServer, redis_server

Spoil = Callable[[redis.Redis, RedisServer], object]


def full_memory(client: redis.Redis, _: RedisServer) -> None:
    client.config_set("maxmemory", "1")


def lost_replicas(client: redis.Redis, _: RedisServer) -> None:
    client.config_set("min-replicas-to-write", "1")


def read_only(client: redis.Redis, main: RedisServer) -> None:
    client.replicaof("127.0.0.1", str(main.port))
    client.config_set("replica-serve-stale-data", "yes")


def mend(client: redis.Redis) -> None:
    client.config_set("maxmemory", "0")
    client.config_set("min-replicas-to-write", "0")
    client.replicaof("NO", "ONE")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (full_memory, "OOM|maxmemory"),
        (lost_replicas, "NOREPLICAS|replicas"),
        (read_only, "read only replica"),
    ],
)
async def test_a_refused_write_is_told_apart_and_the_listing_goes_on(
    spoil: Spoil, words: str, server: RedisServer
) -> None:
    store = RedisStore(server.url, "refused", call_timeout_s=5.0)
    with server.client() as client:
        client.flushall()
        await store.heartbeat(record(), load(), lease_s=60)
        # An entry whose value is gone: a listing that removed it would be a write.
        client.zadd("pdserve:refused:nodes", {"gone": 9e15})
        spoil(client, server)
        try:
            for write in (
                store.heartbeat(record(), load(), lease_s=60),
                store.next_epoch("decode-1"),
                place(store, placement()),
            ):
                with pytest.raises(PlacementRefused, match=words):
                    await write
            assert [node.record for node in await store.live_nodes()] == [record()]
        finally:
            mend(client)
        await store.heartbeat(record(), load(), lease_s=60)
        await unplace(store, placement().attempt)
    await store.close()
