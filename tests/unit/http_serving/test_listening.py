"""The addresses on which a port of HTTP is reached."""

from __future__ import annotations

import socket

import pytest

from http_serving.server import bind


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the system has not both at a time")
@pytest.mark.parametrize("address", ["::1", "127.0.0.1"])
def test_all_addresses_are_those_of_ipv4_too(address: str) -> None:
    with bind("::", 0, backlog=1) as listener:
        port = listener.getsockname()[1]
        try:
            socket.create_connection((address, port), timeout=60).close()
        except OSError:
            if ":" not in address:
                raise
            pytest.skip("this machine has no IPv6 loopback")
