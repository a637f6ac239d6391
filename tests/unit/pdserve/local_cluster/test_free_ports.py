"""Ports of this machine."""

from __future__ import annotations

import errno
import os
import secrets
import socket

import pytest

from common.errors import ConfigError
from pdserve.local_cluster import free_ports as network
from pdserve.local_cluster.free_ports import free_loopback_port, require_free_port


def test_a_free_port_is_given_once() -> None:
    ports = [free_loopback_port() for _ in range(500)]
    assert len(set(ports)) == len(ports)


def test_a_server_listens_on_it_and_its_clients_connect() -> None:
    port = free_loopback_port()
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        accepted, address = server.accept()
        with accepted:
            assert address == client.getsockname()


def test_a_process_that_asks_for_any_port_never_gets_it() -> None:
    given = free_loopback_port()
    with socket.socket() as anybody, pytest.raises(OSError, match="in use"):
        anybody.bind(("127.0.0.1", given))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_free_port_is_free_after_it_was_looked_at(host: str) -> None:
    port = free_loopback_port()
    require_free_port(host, port)
    require_free_port(host, port)


def test_a_machine_without_loopback_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new network namespace: what listens there is reached by nobody."""

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    port = free_loopback_port()
    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(ConfigError, match=r"Network is unreachable: .*ip link set lo up"):
        require_free_port("127.0.0.1", port)


@pytest.mark.parametrize("is_listening", [True, False])
def test_what_is_used_or_was_given_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, is_listening: bool
) -> None:
    first, second = free_loopback_port(), free_loopback_port()
    with socket.socket() as server:
        if is_listening:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", first))
            server.listen()
        monkeypatch.setattr(network, "_MOST_TRIES", 2)
        choices = iter([first, second])
        monkeypatch.setattr(secrets, "randbelow", lambda _: next(choices) - network.LOWEST_PORT)
        with pytest.raises(ConfigError, match="no free port"):
            free_loopback_port()
