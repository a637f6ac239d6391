"""What only a real Redis can do: hold garbage, be away, be slow, come back empty."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import redis

from common.errors import PlacementUnavailable
from common.ids import Incarnation
from common.nodes import Role
from placement.redis_store import RedisStore
from tests.contract.placement_store.worlds import load, place, placement, record, unplace
from tests.support.kv.links import Link
from tests.support.stores.redis_server import RedisServer, redis_server

PREFIX = "pdserve:contract:"


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_url, "contract", call_timeout_s=60.0)
    yield store
    await store.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def _load(**changes: object) -> dict[str, object]:
    names = (
        "free_blocks",
        "free_seats",
        "num_running",
        "num_waiting",
        "queued_tokens",
        "new_token_ratio",
        "num_preemptions",
        "num_recomputed_tokens",
        "num_drafted",
        "num_accepted",
        "num_cached_blocks",
        "num_reserved_blocks",
        "num_receiving_blocks",
        "num_quarantined_blocks",
    )
    return dict.fromkeys(names, 0) | {"kv_links": []} | changes


def _value(**changes: object) -> bytes:
    entry = {
        "epoch": 1,
        "node_id": "bad",
        "role": "decode",
        "control_address": "127.0.0.1:1",
        "model": "m",
        "fingerprint": "f",
        "block_size": 64,
        "num_blocks": 1,
        "max_num_seqs": 1,
        "max_model_len": 1,
        "metrics_address": "",
        "kv_description": "",
        "speculative_method": "none",
        "load": _load(),
    }
    return json.dumps(entry | changes).encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b"[" * 10_000,
        b'{"epoch":' + b"9" * 5000 + b"}",
        _value(role="king"),
        _value(epoch=-1),
        _value(epoch=True),
        _value(epoch=1.5),
        _value(block_size=0),
        _value(load=None),
        _value(load={}),
        _value(load=_load(new_token_ratio=1.5)),
        _value(load=_load(new_token_ratio=float("nan"))),
        _value(load=_load(new_token_ratio=True)),
        _value(load=_load(num_drafted=0.5)),
        _value(load=_load(kv_links={})),
        _value(load=_load(kv_links=[["d1", "shm"]])),
        _value(load=_load(kv_links=[["d1", "shm", True]])),
        _value(load=_load(kv_links=[["d1", "shm", 1, 0]])),
        _value(load=_load(kv_links=[["d1", 5, True, 0]])),
        _value(load=_load(kv_links=[["d1", "shm", True, -1]])),
        _value(load=_load(kv_links=[["d1", "shm", True, 0]] * 33)),
        _value(load=_load(num_cached_blocks=-1)),
        _value(load=_load(num_receiving_blocks=None)),
        _value(metrics_address="no port"),
        _value(kv_description=5),
        _value(speculative_method=""),
        _value(control_address=""),
        _value(control_address="127.0.0.1"),
        _value(control_address="127.0.0.1:0"),
        _value(control_address="127.0.0.1:65536"),
        _value(control_address="a b:1"),
        _value(control_address="\ud800:1"),
        _value(model="\ud800"),
        _value(model="m" * 600),
        _value(node_id="other"),
        b" " * 20_000 + _value(),
    ],
)
async def test_a_garbage_lease_is_skipped_and_can_be_replaced(
    store: RedisStore, client: redis.Redis, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await store.heartbeat(record("good"), load(), lease_s=100)
    client.set(PREFIX + "node:bad", garbage)
    client.zadd(PREFIX + "nodes", {"bad": 9e15})
    with caplog.at_level(logging.WARNING, "pdserve.placement"):
        nodes = await store.live_nodes()
    assert [node.record.incarnation.node_id for node in nodes] == ["good"]
    await store.heartbeat(record("bad", epoch=2), load(), lease_s=100)
    assert len(await store.live_nodes()) == 2


async def test_a_value_that_cannot_be_read_is_logged_once(
    store: RedisStore, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pdserve.placement"):
        for value, num_logged in ((b"{", 1), (b"{", 1), (_value(), 1), (b"{", 2)):
            client.set(PREFIX + "node:bad", value)
            client.zadd(PREFIX + "nodes", {"bad": 9e15})
            await store.live_nodes()
            assert len(caplog.messages) == num_logged


async def test_a_valid_value_under_that_harness_is_not_skipped(
    store: RedisStore, client: redis.Redis
) -> None:
    """The negative control of the garbage table."""
    client.set(PREFIX + "node:bad", _value())
    client.zadd(PREFIX + "nodes", {"bad": 9e15})
    assert len(await store.live_nodes()) == 1


async def test_a_listing_takes_records_that_have_not_changed_from_the_one_before(
    store: RedisStore,
) -> None:
    first, second = record("n1"), record("n2")
    for one in (first, second):
        await store.heartbeat(one, load(), lease_s=100)
    before = [node.record for node in await store.live_nodes()]
    await store.heartbeat(first, load(3), lease_s=100)
    await store.heartbeat(replace(second, role=Role.MIXED), load(), lease_s=100)
    now = await store.live_nodes()
    assert [(node.record.role, node.load.num_running) for node in now] == [
        (Role.DECODE, 3),
        (Role.MIXED, 0),
    ]
    assert [node.record is one for node, one in zip(now, before, strict=True)] == [True, False]


async def test_no_more_of_a_record_travels_than_a_record_may_have(
    store: RedisStore, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await store.heartbeat(record("good"), load(), lease_s=100)
    client.set(PREFIX + "node:bad", b"x" * (64 << 20))
    client.zadd(PREFIX + "nodes", {"bad": 9e15})
    before = client.info("stats")["total_net_output_bytes"]
    with caplog.at_level(logging.WARNING, "pdserve.placement"):
        assert len(await store.live_nodes()) == 1
    after = client.info("stats")["total_net_output_bytes"]
    assert after - before < 64 << 10
    assert "16385 bytes: wanted at most 16384" in caplog.text


async def test_more_calls_than_connections_wait_for_one(store: RedisStore) -> None:
    await store.heartbeat(record(), load(), lease_s=100)
    async with asyncio.timeout(30):
        listings = await asyncio.gather(*(store.live_nodes() for _ in range(64)))
    assert [len(listing) for listing in listings] == [1] * 64


async def test_keys_of_another_type_are_absent(store: RedisStore, client: redis.Redis) -> None:
    client.rpush(PREFIX + "node:decode-0", "a", "b")
    client.rpush(PREFIX + "epoch:decode-0", "a")
    client.zadd(PREFIX + "nodes", {"decode-0": 9e15})
    assert await store.live_nodes() == []
    epoch = await store.next_epoch("decode-0")
    await store.heartbeat(record(epoch=epoch), load(), lease_s=100)
    assert len(await store.live_nodes()) == 1


async def test_an_index_of_another_type_is_an_unavailable_store(
    store: RedisStore, client: redis.Redis
) -> None:
    client.set(PREFIX + "nodes", "not an index")
    with pytest.raises(PlacementUnavailable, match="WRONGTYPE"):
        await store.live_nodes()


async def test_garbage_placements_are_skipped(store: RedisStore, client: redis.Redis) -> None:
    await place(store, placement("req-1"))
    value = client.get(PREFIX + "placement:req-1/1")
    assert isinstance(value, bytes)
    for name, garbage in (
        ("a/1", b"{"),
        ("b/1", b'{"decode": 3}'),
        ("c/1", value),
        ("d/1", value.replace(b'"decode":{', b'"decode":["x"],"y":{')),
    ):
        client.set(PREFIX + "placement:" + name, garbage)
        client.zadd(PREFIX + "placements", {name: 9e15})
    assert await store.placements() == [placement("req-1")]


@pytest.mark.covers("F74")
async def test_every_key_expires_by_itself(store: RedisStore, client: redis.Redis) -> None:
    await store.next_epoch("decode-0")
    await store.heartbeat(record(), load(), lease_s=50)
    await place(store, placement("req-1"), ttl_s=1000)
    await place(store, placement("req-2"), ttl_s=100)
    ttls_ms = {key: client.pttl(key) for key in client.keys("*")}
    assert len(ttls_ms) == 6
    assert all(ttl_ms > 0 for ttl_ms in ttls_ms.values())
    assert ttls_ms[PREFIX.encode() + b"placements"] > 900_000, (
        "the index outlives its longest entry"
    )
    assert ttls_ms[PREFIX.encode() + b"nodes"] <= 50_000


async def test_index_entries_of_expired_leases_are_cleaned_by_the_next_write(
    store: RedisStore, client: redis.Redis
) -> None:
    for index in range(20):
        await store.heartbeat(record(f"n{index:02}"), load(), lease_s=100)
        client.delete(f"{PREFIX}node:n{index:02}")
        client.zadd(PREFIX + "nodes", {f"n{index:02}": 1.0})
    assert await store.live_nodes() == []
    await store.heartbeat(record("n20"), load(), lease_s=100)
    assert client.zrange(PREFIX + "nodes", 0, -1) == [b"n20"]
    for index in range(5):
        client.zadd(PREFIX + "placements", {f"gone-{index}/1": 1.0})
    await place(store, placement(), ttl_s=100)
    assert client.zcard(PREFIX + "placements") == 1


async def test_clusters_on_one_server_do_not_see_each_other(
    store: RedisStore, redis_url: str
) -> None:
    other = RedisStore(redis_url, "other", call_timeout_s=60.0)
    await other.heartbeat(record(), load(), lease_s=100)
    await place(other, placement(), ttl_s=100)
    assert await store.live_nodes() == []
    assert await store.placements() == []
    await other.close()


@pytest.mark.covers("F70")
async def test_an_epoch_rises_when_the_clock_was_set_back(
    store: RedisStore, client: redis.Redis
) -> None:
    """The remembered epoch, or that of the lease, is ahead of the server's clock."""
    ahead = 8_000_000_000_000_000
    client.set(PREFIX + "epoch:a", ahead)
    assert await store.next_epoch("a") == ahead + 1
    await store.heartbeat(record("b", epoch=ahead), load(), lease_s=100)
    client.delete(PREFIX + "epoch:b")
    assert await store.next_epoch("b") == ahead + 1


@pytest.mark.covers("F70")
async def test_an_epoch_rises_when_the_clock_was_set_back_while_its_node_was_away(
    store: RedisStore,
) -> None:
    ahead = 8_000_000_000_000_000
    await store.heartbeat(record("a", epoch=ahead), load(), lease_s=5)
    await store.leave(Incarnation("a", ahead))
    assert await store.live_nodes() == []
    assert await store.next_epoch("a") == ahead + 1


async def test_a_heartbeat_restores_the_memory_of_its_epoch(
    store: RedisStore, client: redis.Redis
) -> None:
    await store.heartbeat(record("a", epoch=7), load(), lease_s=100)
    assert client.get(PREFIX + "epoch:a") == b"7"
    assert client.pttl(PREFIX + "epoch:a") > 3_000_000


async def test_a_newer_start_that_has_not_registered_is_not_forgotten(
    store: RedisStore, client: redis.Redis
) -> None:
    newer = await store.next_epoch("a")
    await store.heartbeat(record("a", epoch=newer - 1), load(), lease_s=100)
    await store.leave(Incarnation("a", newer - 1))
    assert client.get(PREFIX + "epoch:a") == str(newer).encode()


async def test_no_server_is_a_typed_error_from_every_method(own_server: RedisServer) -> None:
    store = RedisStore(own_server.url, "contract")
    own_server.kill()
    for call in (
        store.next_epoch("a"),
        store.heartbeat(record(), load(), lease_s=100),
        store.leave(Incarnation("a", 1)),
        store.live_nodes(),
        place(store, placement(), ttl_s=100),
        unplace(store, placement().attempt),
        store.placements(),
    ):
        with pytest.raises(PlacementUnavailable):
            await call
    await store.close()


@pytest.mark.covers("F72")
async def test_a_restarted_server_is_filled_by_the_next_heartbeat(own_server: RedisServer) -> None:
    """The same store object goes on, on new connections and with unloaded scripts."""
    store = RedisStore(own_server.url, "contract", call_timeout_s=60.0)
    epoch = await store.next_epoch("decode-0")
    await store.heartbeat(record(epoch=epoch), load(), lease_s=100)
    own_server.kill()
    with pytest.raises(PlacementUnavailable):
        await store.live_nodes()
    own_server.start()
    assert await store.live_nodes() == []
    assert await store.next_epoch("decode-0") > epoch
    await store.heartbeat(record(epoch=epoch), load(), lease_s=100)
    assert len(await store.live_nodes()) == 1
    await store.close()


@pytest.mark.covers("F73")
async def test_a_server_that_accepts_and_says_nothing_is_unavailable_in_time() -> None:
    """Every call has a deadline."""
    release = asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = RedisStore(f"redis://127.0.0.1:{port}/0", "contract", call_timeout_s=0.05)
    with pytest.raises(PlacementUnavailable, match=r"within 0\.05 s"):
        await store.live_nodes()
    release.set()
    await store.close()
    server.close()
    await server.wait_closed()


async def test_a_server_that_speaks_something_else_is_unavailable() -> None:
    async def garbage(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = RedisStore(f"redis://127.0.0.1:{port}/0", "contract", call_timeout_s=60.0)
    with pytest.raises(PlacementUnavailable):
        await store.live_nodes()
    await store.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("num_ticks", range(12))
async def test_a_cancelled_call_ends_its_task(store: RedisStore, num_ticks: int) -> None:
    """Wherever in the call the cancellation lands: a swallowed one keeps a closing process up."""
    await store.live_nodes()
    for _ in range(20):
        task = asyncio.create_task(store.live_nodes())
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        if task.cancel():
            await asyncio.wait({task})
            assert task.cancelled()
    assert await store.live_nodes() == [], "and the connections are fit for use"


@pytest.mark.covers("F121")
@pytest.mark.parametrize("is_back", [False, True], ids=["to the store", "from the store"])
async def test_a_loss_in_one_direction_makes_the_store_unavailable_in_time(
    redis_url: str, is_back: bool
) -> None:
    link = Link(urlsplit(redis_url).port or 0)
    store = RedisStore(f"redis://{link.address}/0", "one-way", call_timeout_s=60.0)
    assert await store.live_nodes() == []
    link.cut_one_way(is_back=is_back)
    store._call_timeout_s = 0.05
    with pytest.raises(PlacementUnavailable):
        await store.live_nodes()
    link.mend()
    store._call_timeout_s = 60.0
    assert await store.live_nodes() == []
    await store.close()
    link.close()
