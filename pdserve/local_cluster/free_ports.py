"""Ports of this machine: is one free, which one is free."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from contextlib import suppress

from common.errors import ConfigError

_LOWEST_PORT = 10_240
_NUM_PORTS = 32_768 - _LOWEST_PORT
_MOST_TRIES = 1000
_CONNECT_TIMEOUT_S = 10.0


def require_free_port(host: str, port: int) -> None:
    """Raises `ConfigError` when nothing could listen on this address."""
    try:
        with _listening(host, port):
            return
    except socket.gaierror:
        raise ConfigError(f"host is {host!r}: wanted an address of this machine") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: stop what listens there, "
                "or choose another with --port"
            ) from None
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from None


def free_loopback_port() -> int:
    """A TCP port on 127.0.0.1 that nothing uses, and that for a minute nobody is given who asks
    like this, or is given a port by Linux. `ConfigError` when none is found.

    It is outside of what Linux takes for outgoing connections, and a connection to it was just
    closed: in that state (TIME_WAIT) only a listener that sets SO_REUSEADDR gets it, as servers do.
    """
    for _ in range(_MOST_TRIES):
        port = _LOWEST_PORT + secrets.randbelow(_NUM_PORTS)
        if _is_untouched(port):
            with suppress(OSError), _listening("127.0.0.1", port) as listener:
                with socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_TIMEOUT_S):
                    listener.accept()[0].close()  # first, or the state is the other end's
                return port
    raise ConfigError("no free port was found on 127.0.0.1: end what listens there")


def _is_untouched(port: int) -> bool:
    """Whether not even a closed connection keeps it."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def connectable_host(host: str) -> str:
    """The host a client on this machine uses for a listening address, in brackets for IPv6."""
    if host in ("0.0.0.0", ""):  # noqa: S104 (compared, not bound)
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _listening(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener
