"""A listening socket, and a uvicorn server that serves it and leaves signals to its process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from common.addresses import host_port
from common.errors import ConfigError
from http_serving.bounded_connections import (
    BoundedConnection,
    ConnectionLimits,
    IdleConnections,
    Refused,
)

MAX_LAST_CONNECTIONS = 4096
"""Connections accepted while the listener closes: more than a kernel queues."""


def bind(host: str, port: int, *, backlog: int, purpose: str = "") -> socket.socket:
    """Return a listening socket; port 0 takes any free one.

    Call it before anything slow, so that a port in use is reported at once.

    Raises `ConfigError`, with the address, when nothing can listen there.
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
    """Ends when `should_exit` is set; it leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    async def stop_accepting(self, listener: socket.socket) -> None:
        """Close `listener`, and serve the clients that connected before.

        The kernel completes connections on its own and queues them. Closing the socket would reset
        the queued ones, which may have sent requests: all are accepted first, in the same turn.
        """
        last = []
        with contextlib.suppress(OSError):
            for _ in range(MAX_LAST_CONNECTIONS):
                last.append(listener.accept()[0])
        for listening in self.servers:
            listening.close()
        loop = asyncio.get_running_loop()
        protocol = partial(
            cast(Any, self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for connection in last:
            connection.setblocking(False)
            await loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl)


def make_server(
    app: ASGIApp,
    *,
    limits: ConnectionLimits,
    on_refused: Callable[[Refused], None] = lambda _: None,
    tls: ssl.SSLContext | None = None,
    **own: Any,
) -> Server:
    """Return a server of `app`, not yet serving. `own` are further settings of `uvicorn.Config`.

    With `tls` it speaks HTTPS, and nothing else.

    It sends no `server` header. It logs errors of the application only: invalid requests of
    unauthenticated clients would flood the log, and `on_refused` counts them.
    """
    shared: dict[str, Any] = {
        "http": partial(
            BoundedConnection, limits=limits, idle=IdleConnections(), on_refused=on_refused
        ),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "log_level": "error",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        # Longer than `idle_timeout_s`, so that only `BoundedConnection` closes idle connections.
        "timeout_keep_alive": math.ceil(2 * limits.idle_timeout_s),
    }
    if tls is not None:
        shared["ssl_context_factory"] = lambda *_: tls
    return Server(uvicorn.Config(app, **{**shared, **own}))
