"""A listening socket, and a uvicorn server that serves it and leaves signals to its process."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from common.addresses import host_port
from common.errors import ConfigError
from http_serving.bounded_connections import BoundedConnection, ConnectionLimits, Refused


def bind(host: str, port: int, *, backlog: int, purpose: str = "") -> socket.socket:
    """A listening socket; port 0 takes any free one. `ConfigError` names the address at fault.

    Done before anything slow, so that a port in use is reported at once.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=backlog)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        what = f" {purpose}" if purpose else ""
        raise ConfigError(f"cannot listen{what} on {host_port(host, port)}: {reason}") from error
    listener.setblocking(False)
    return listener


class Server(uvicorn.Server):
    """Ends when told by `should_exit`; signals belong to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def make_server(
    app: ASGIApp,
    *,
    limits: ConnectionLimits,
    on_refused: Callable[[Refused], None] = lambda _: None,
    **own: Any,
) -> Server:
    """A server of `app`, not yet serving. `own` are further settings of `uvicorn.Config`.

    It does not say what it is. Of requests it logs bugs alone: what strangers send comes in floods,
    and is counted by `on_refused`.
    """
    shared: dict[str, Any] = {
        "http": partial(BoundedConnection, limits=limits, on_refused=on_refused),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "log_level": "error",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        # Longer than a connection may be idle, so that one clock decides.
        "timeout_keep_alive": math.ceil(2 * limits.idle_timeout_s),
    }
    return Server(uvicorn.Config(app, **{**shared, **own}))
