"""Serve the web application: listen first, serve until a stop or drain, then end gracefully."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from http_serving.abort_connection import abort_connection
from http_serving.bounded_connections import ConnectionLimits, Refused
from http_serving.certificate import Certificate
from http_serving.server import Server, bind, make_server

log = logging.getLogger("pdserve.router")

BACKLOG = 2048
GRACE_S = 3.0
LINGER_S = 0.5
"""Seconds for which a connection may stay without a request while the router drains.

A connection that was just made, or that a load balancer keeps, often has a request on its way.
"""

# A body of 10 MiB within a minute is 1.4 Mbit/s. Who keeps connections closes them first, so that
# no request meets one that this server closes: proxies in Go and clients in Rust keep them for
# 90 s, Caddy for 120 s, Google's load balancers for 600 s. An idle one costs little, and gives way
# where there are too many.
LIMITS = ConnectionLimits(max_connections=4096, request_timeout_s=60.0, idle_timeout_s=620.0)


def router_limits(max_connections: int) -> ConnectionLimits:
    """Return the port's limits."""
    return replace(LIMITS, max_connections=max_connections)


def count_refused(registry: CollectorRegistry) -> Callable[[Refused], None]:
    """Count connections that were closed without an answer, in a metric of `registry`."""
    counter = Counter(
        "pdserve_refused_connections_total",
        "HTTP connections closed unanswered: too_many, too_slow, head_too_large, malformed",
        ["reason"],
        registry=registry,
    )
    of_reason = {reason: counter.labels(reason.value) for reason in Refused}
    return lambda reason: of_reason[reason].inc()


def bind_http(host: str, port: int) -> socket.socket:
    """Bind the router's port, see `http_serving.server.bind`."""
    return bind(host, port, backlog=BACKLOG)


async def serve_http(
    app: ASGIApp,
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
    drain_timeout_s: float = 0.0,
    grace_s: float = GRACE_S,
    limits: ConnectionLimits = LIMITS,
    on_refused: Callable[[Refused], None] = lambda _: None,
    certificate: Certificate | None = None,
) -> None:
    """Serve on `listener` until `stop` or `drain` is set; then accept no connection and end.

    Requests still running `grace_s` after `stop`, or `drain_timeout_s` after `drain`, are
    cancelled, which closes their generators. While draining, every connection is closed after the
    present answer, and `stop` ends the waiting. The socket is closed in any case. The caller
    chooses the event loop; uvloop is the fastest. With a `certificate` the port speaks HTTPS.
    """
    drain = drain or asyncio.Event()
    server = make_server(
        _closing(app, drain),
        limits=limits,
        on_refused=on_refused,
        tls=certificate.context if certificate else None,
        end_within_s=grace_s,
    )
    watching = asyncio.create_task(certificate.keep_current()) if certificate else None
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    draining = asyncio.create_task(drain.wait())
    try:
        await asyncio.wait({serving, stopping, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done() and not stop.is_set():
            await _drain(server, listener, serving, stopping, drain_timeout_s)
    finally:
        server.should_exit = True
        stopping.cancel()
        draining.cancel()
        if watching is not None:
            watching.cancel()
        try:
            await serving
        finally:
            listener.close()


async def _drain(
    server: Server,
    listener: socket.socket,
    serving: asyncio.Task[None],
    stopping: asyncio.Task[bool],
    timeout_s: float,
) -> None:
    """Stop accepting; return when the running requests have ended, or at a stop."""
    log.info("draining: running requests have %g s to finish", timeout_s)
    await server.stop_accepting(listener)
    await asyncio.wait({stopping}, timeout=min(LINGER_S, timeout_s))
    server.end_within_s = timeout_s
    server.should_exit = True
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        server.cancel_requests()
    elif not server.force_exit:
        log.info("drained: nothing is left")


def _closing(app: ASGIApp, drain: asyncio.Event) -> ASGIApp:
    """Return `app`, whose answers while draining also close their connection.

    A request that the server cancels ends with its connection: the server would log that as an
    error of the application.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            await app(scope, receive, send_and_close if drain.is_set() else send)
        except asyncio.CancelledError:
            abort_connection(scope)

    return serve
