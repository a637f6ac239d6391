"""A Redis that drops keys when its memory is full: processes say so at their start, and go on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from placement.redis_store import RedisStore
from tests.contract.placement_store.worlds import load, record
from tests.support.stores.redis_server import RedisServer, redis_server
from tests.support.stores.refusing_redis import mend

LEASE = "pdserve:evicting:node:decode-1"
MAX_FILLERS = 100_000


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        yield client
        client.config_set("maxmemory-policy", "noeviction")
        mend(client, server)


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(server.url, "evicting", call_timeout_s=60.0)
    yield store
    await store.close()


# All keys have an expiry, so the policies for volatile keys drop them too.
@pytest.mark.covers("F74")
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_redis_that_evicts_is_named_at_the_start(
    policy: str, store: RedisStore, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", "1gb")
    with caplog.at_level(logging.WARNING, "pdserve.placement"):
        await store.next_epoch("a")
    (line,) = caplog.messages
    assert f"maxmemory-policy {policy}" in line
    assert "wanted noeviction" in line


@pytest.mark.covers("F74")
@pytest.mark.parametrize(
    ("policy", "maxmemory"), [("noeviction", "1gb"), ("allkeys-lru", "0"), ("noeviction", "0")]
)
async def test_a_redis_that_drops_nothing_is_not(
    policy: str,
    maxmemory: str,
    store: RedisStore,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", maxmemory)
    await store.next_epoch("a")
    assert caplog.messages == []


@pytest.mark.covers("F74")
async def test_a_redis_that_does_not_answer_info_is_used(
    server: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Managed ones may not, and users that an earlier release wrote have no right to ask."""
    client.acl_setuser(
        "old", True, passwords=["+word"], keys=["*"], categories=["+@all"], commands=["-info"]
    )
    url = server.url.replace("redis://", "redis://old:word@")
    old = RedisStore(url, "evicting", call_timeout_s=60.0)
    first = await old.next_epoch("a")
    assert await old.next_epoch("a") > first
    assert caplog.messages == []
    await old.close()


@pytest.mark.covers("F74")
async def test_an_evicted_lease_comes_back_with_the_next_heartbeat(
    store: RedisStore, client: redis.Redis
) -> None:
    epoch = await store.next_epoch("decode-1")
    await store.heartbeat(record("decode-1", epoch=epoch), load(), lease_s=60)
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
    fillers = 0
    while client.exists(LEASE):
        client.set(f"filler:{fillers}", b"x" * 4096)
        fillers += 1
        assert fillers < MAX_FILLERS, "nothing was evicted"
    assert await store.live_nodes() == []
    client.config_set("maxmemory", "0")
    await store.heartbeat(record("decode-1", epoch=epoch), load(), lease_s=60)
    assert [node.record.epoch for node in await store.live_nodes()] == [epoch]
    assert await store.next_epoch("decode-1") > epoch
