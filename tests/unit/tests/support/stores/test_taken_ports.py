"""Servers of tests whose free port another process took meanwhile: they get another one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.stores import redis_server as starter
from tests.support.stores.redis_server import RedisServer, redis_server
from tests.support.stores.redis_topologies import Sentinel

Make = Callable[[Path, RedisServer], RedisServer]


@pytest.mark.parametrize("make", [lambda folder, _main: RedisServer(folder), Sentinel])
def test_a_server_takes_another_port_where_one_was_taken(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server() as main, socket.socket() as taker:
        taker.bind(("127.0.0.1", 0))
        taker.listen()
        ports = [taker.getsockname()[1], main.port]
        monkeypatch.setattr(
            starter, "free_loopback_port", lambda: ports.pop(0) if ports else free_loopback_port()
        )
        server = make(tmp_path, main)
        try:
            server.start()
            assert not ports, "both were tried: of nobody that answers, and of another server"
            with server.client() as client:
                assert client.ping()
        finally:
            server.kill()
