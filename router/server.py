"""Serving the web application: listen first, serve until told to stop, then end gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from common.errors import ConfigError

BACKLOG = 2048
GRACE_S = 3.0


def bind_http(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. `ConfigError` names the address at fault.

    Done before anything slow, so that a port in use is reported at once.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(
    app: FastAPI, listener: socket.socket, *, stop: asyncio.Event, grace_s: float = GRACE_S
) -> None:
    """Serve on `listener` until `stop` is set; then take no new connection and end.

    Requests still running after `grace_s` are cancelled, which closes their generators. The
    socket is closed in any case. The caller chooses the event loop: uvloop is the fast one.
    """
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        stopping.cancel()
        try:
            await serving
        finally:
            listener.close()
