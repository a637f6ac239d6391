"""Every way in which a running Redis answers reads and refuses writes, and the way back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import redis

from tests.support.clocks.waiting import wait_until
from tests.support.stores.redis_server import RedisServer

Spoil = Callable[[redis.Redis, RedisServer], object]


def full_memory(client: redis.Redis, _: RedisServer) -> None:
    """Refuse with OOM."""
    client.config_set("maxmemory", "1")


def lost_replicas(client: redis.Redis, _: RedisServer) -> None:
    """Refuse with NOREPLICAS."""
    client.config_set("min-replicas-to-write", "1")


def read_only(client: redis.Redis, main: RedisServer) -> None:
    """Refuse with READONLY: another server of this machine was promoted."""
    client.replicaof("127.0.0.1", str(main.port))
    client.config_set("replica-serve-stale-data", "yes")


def failed_snapshot(client: redis.Redis, _: RedisServer) -> None:
    """Refuse with MISCONF: a snapshot was not written. Here its folder is gone."""
    with tempfile.TemporaryDirectory(prefix="pdserve-redis-") as folder:
        client.config_set("dir", folder)
    client.config_set("save", "3600 1000000")
    client.config_set("stop-writes-on-bgsave-error", "yes")
    client.bgsave()
    wait_until(
        lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err",
        "the snapshot has failed",
    )


def mend(client: redis.Redis, server: RedisServer) -> None:
    """Take writes again, whatever was spoilt."""
    client.config_set("maxmemory", "0")
    client.config_set("min-replicas-to-write", "0")
    client.replicaof("NO", "ONE")
    client.config_set("save", "")
    client.config_set("dir", str(server.folder))
