"""Free ports of this machine."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from contextlib import suppress

from common.errors import ConfigError

LOWEST_PORT = 10_240
_NUM_PORTS = 32_768 - LOWEST_PORT
_MOST_TRIES = 1000
_CONNECT_TIMEOUT_S = 10.0


def require_free_port(host: str, port: int) -> None:
    """Return if a server could listen on this address, and be reached from this machine.

    Raises `ConfigError` otherwise.
    """
    try:
        with _listening(host, port) as listener:
            _require_connection(listener)
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


def _require_connection(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} cannot be reached from this machine: "
            f"{error.strerror or error}: wanted a loopback interface (ip link set lo up)"
        ) from None


def free_loopback_port() -> int:
    """Return a free TCP port on 127.0.0.1 that no other caller of this gets for a minute.

    It is outside of the range from which Linux gives ports to outgoing connections. A connection to
    it was just closed, and in that state (TIME_WAIT) only a listener with SO_REUSEADDR can bind it,
    which servers set and this function does not.

    Raises `ConfigError` when no port is found.
    """
    for _ in range(_MOST_TRIES):
        port = LOWEST_PORT + secrets.randbelow(_NUM_PORTS)
        if _is_untouched(port):
            with suppress(OSError), _listening("127.0.0.1", port) as listener:
                with socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_TIMEOUT_S):
                    listener.accept()[0].close()  # first: the end that closes first is in TIME_WAIT
                return port
    raise ConfigError("no free port was found on 127.0.0.1: end what listens there")


def _is_untouched(port: int) -> bool:
    """Return whether the port has no listener and no connection in TIME_WAIT."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def connectable_host(host: str) -> str:
    """Return the host with which a local client reaches a listening address; IPv6 in brackets."""
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
