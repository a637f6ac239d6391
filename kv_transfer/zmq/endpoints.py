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


def look_up(host: str) -> str:
    """Return an address of the name `host`; waits for name servers. Raises `OSError`.

    IPv4 is preferred: a node that listens on every IPv4 address is the most frequent case.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    by_family = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    address = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6)
    if address is None:
        raise OSError("it has neither an IPv4 nor an IPv6 address")
    return address


def address_to_bind(host: str) -> str:
    """Return the address of a host to listen on. Raises `ConfigError` for an unknown name."""
    try:
        return host if is_number(host) else look_up(host)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"KV host {host} cannot be resolved: {error}") from None
