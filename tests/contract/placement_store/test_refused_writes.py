"""A real Redis that answers reads and refuses writes: every way in which it does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from placement.redis_store import RedisStore
from placement.store import PlacementRefused
from tests.contract.placement_store.worlds import load, place, placement, record, unplace
from tests.support.stores.redis_server import RedisServer, redis_server
from tests.support.stores.refusing_redis import (
    Spoil,
    failed_snapshot,
    full_memory,
    lost_replicas,
    mend,
    read_only,
)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server_without_disk(tmp_path: Path) -> Iterator[RedisServer]:
    """Its append-only file is on a device that has no space."""
    (tmp_path / "appendonly.aof").symlink_to("/dev/full")
    server = RedisServer(tmp_path, options=("--appendonly", "yes"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def opened(server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(server.url, "refused", call_timeout_s=60.0)
    try:
        yield store
    finally:
        await store.close()


async def refuses_writes(store: RedisStore, words: str) -> None:
    """Every write fails and tells why."""
    for write in (
        store.heartbeat(record(), load(), lease_s=60),
        store.next_epoch("decode-1"),
        place(store, placement()),
    ):
        with pytest.raises(PlacementRefused, match=words):
            await write


@pytest.mark.covers("F73")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (full_memory, "OOM|maxmemory"),
        (lost_replicas, "NOREPLICAS|replicas"),
        (read_only, "read only replica"),
        (failed_snapshot, "MISCONF .* not able to persist on disk"),
    ],
)
async def test_a_refused_write_is_told_apart_and_the_listing_goes_on(
    spoil: Spoil, words: str, server: RedisServer
) -> None:
    async with opened(server) as store:
        with server.client() as client:
            client.flushall()
            await store.heartbeat(record(), load(), lease_s=60)
            # An entry whose value is gone: a listing that removed it would be a write.
            client.zadd("pdserve:refused:nodes", {"gone": 9e15})
            spoil(client, server)
            try:
                await refuses_writes(store, words)
                assert [node.record for node in await store.live_nodes()] == [record()]
            finally:
                mend(client, server)
        await store.heartbeat(record(), load(), lease_s=60)
        await unplace(store, placement().attempt)


@pytest.mark.covers("F73")
async def test_a_log_on_a_full_disk_is_a_refusal_that_ends_with_the_log(
    server_without_disk: RedisServer,
) -> None:
    async with opened(server_without_disk) as store:
        await refuses_writes(store, "MISCONF .* No space left on device")
        assert await store.live_nodes() == []
        with server_without_disk.client() as client:
            client.config_set("appendonly", "no")
        await store.heartbeat(record(), load(), lease_s=60)
        assert [node.record for node in await store.live_nodes()] == [record()]
