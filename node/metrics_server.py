"""Prometheus metrics of a node over HTTP, on the event loop and on the node's own address.

    GET /metrics

Reading them waits for nobody: they are made from the statistics that the step thread left last.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import ConfigError

BACKLOG = 16
MAX_CONNECTIONS = 16
KEEP_ALIVE_S = 60
GRACE_S = 1


def bind_metrics(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. `ConfigError` names the address at fault."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen for metrics on {host}:{port}: {reason}") from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class MetricsServer:
    """Serves `registry` on `listener` from `start` to `stop`, which closes the socket."""

    def __init__(self, registry: CollectorRegistry, listener: socket.socket) -> None:
        async def metrics(_: Request) -> Response:
            return Response(
                generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST}
            )

        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                Starlette(routes=[Route("/metrics", metrics)]),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._serving: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Begin to answer."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Let what is being answered end, and close."""
        self._server.should_exit = True
        try:
            if self._serving is not None:
                await self._serving
        finally:
            self._listener.close()
