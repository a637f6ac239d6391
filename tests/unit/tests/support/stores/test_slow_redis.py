"""A Redis of a test that a loaded machine lets answer late."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import redis

from tests.support.stores.redis_server import redis_server


def test_a_start_outlasts_an_answer_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real, late = redis.Redis.info, [True]

    def info(client: redis.Redis, section: str) -> Any:
        if late and late.pop():
            raise redis.TimeoutError
        return real(client, section)

    monkeypatch.setattr(redis.Redis, "info", info)
    with redis_server() as server, server.client() as client:
        assert client.ping()
    assert not late


def test_a_start_that_fails_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, real = [], subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        begun.append(real(*args, **options))
        return begun[-1]

    def info(*_: object) -> None:
        raise redis.ResponseError

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(redis.Redis, "info", info)
    with pytest.raises(redis.ResponseError), redis_server():
        pass
    (server,) = begun
    assert server.poll() is not None
