"""KV endpoints as text, `tcp://host:port`, and the addresses behind host names.

ZMQ is given numbers only. It would resolve a name in its one I/O thread, at every connect: while a
name server does not answer, the bytes of all peers stand still.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from common.addresses import host_port
from common.errors import ConfigError

TRY_S = 1.0
"""How long one of several addresses has to accept a connection."""


def tcp(host: str, port: int) -> str:
    """Return the endpoint of a host and a port."""
    return f"tcp://{host_port(host, port)}"


def parse_tcp(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint, which may be any text. Raises `ValueError`."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError("wanted an endpoint tcp://host:port")
    return parts.hostname, parts.port


def is_number(host: str) -> bool:
    """Return whether `host` is an address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def look_up(host: str, port: int) -> str:
    """Return the address of the name `host` where a peer listens. Raises `OSError`.

    It waits for name servers and, where the name has several addresses, for the peer: the first
    one that accepts a connection is returned, or the last one.
    """
    *others, last = addresses_of(host)
    return next((address for address in others if _accepts(address, port)), last)


def addresses_of(host: str) -> list[str]:
    """Return one address at least. Raises `OSError`.

    IPv4 precedes: a node that listens on every IPv4 address is the most frequent case.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [
        str(address[0])
        for wanted in (socket.AF_INET, socket.AF_INET6)
        for family, _, _, _, address in found
        if family == wanted
    ]
    if not addresses:
        raise OSError("it has neither an IPv4 nor an IPv6 address")
    return list(dict.fromkeys(addresses))


def _accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), TRY_S).close()
    except OSError:
        return False
    return True


def address_to_bind(host: str) -> str:
    """Return the address of a host to listen on. Raises `ConfigError` for an unknown name."""
    try:
        return host if is_number(host) else addresses_of(host)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"KV host {host} cannot be resolved: {error}") from None
