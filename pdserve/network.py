"""Ports of this machine: is one free, which one is free."""

from __future__ import annotations

import errno
import os
import socket

from common.errors import ConfigError


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
    """A TCP port on 127.0.0.1 that nothing listened on a moment ago."""
    with _listening("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
        return port


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
