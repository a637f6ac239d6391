"""A listening socket, and a uvicorn server that serves it and leaves signals to its process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

logger = logging.getLogger("pdserve.http")

CLOSING_S = 1
"""How long the sockets may take to close once all requests have ended, in seconds."""

MAX_LAST_CONNECTIONS = 4096
"""Connections accepted while the listener closes: more than a kernel queues."""


def bind(host: str, port: int, *, backlog: int, purpose: str = "") -> socket.socket:
    """Return a listening socket; port 0 takes any free one.

    `::` is every address of the machine, those of IPv4 too where the system allows both. Call it
    before anything slow, so that a port in use is reported at once.

    Raises `ConfigError`, with the address, when nothing can listen there.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(
            (host, port),
            family=family,
            backlog=backlog,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        what = f" {purpose}" if purpose else ""
        raise ConfigError(f"cannot listen{what} on {host_port(host, port)}: {reason}") from error
    listener.setblocking(False)
    return listener


class Server(uvicorn.Server):
    """Ends when `should_exit` is set; it leaves signals to the process."""

    end_within_s = 0.0
    """How long requests in progress may take when the server ends, in seconds."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests in progress, at most `end_within_s`, and cancel the others.

        uvicorn would log that as an error. Its own limit remains for what comes after.
        """
        self.config.timeout_graceful_shutdown = math.ceil(self.end_within_s) + CLOSING_S
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.end_within_s, self.cancel_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def cancel_requests(self) -> None:
        """Cancel the requests in progress, and end without waiting for them."""
        self.force_exit = True
        if tasks := list(self.server_state.tasks):
            logger.info("cancelled %d requests that were in progress at the end", len(tasks))
        for task in tasks:
            task.cancel()

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
    end_within_s: float,
    **own: Any,
) -> Server:
    """Return a server of `app`, not yet serving. `own` are further settings of `uvicorn.Config`.

    Requests in progress are cancelled `end_within_s` after `should_exit` is set.

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
    server = Server(uvicorn.Config(app, **{**shared, **own}))
    server.end_within_s = end_within_s
    return server
