"""Metrics and probes of a node over HTTP, on the event loop and on the node's own address.

    GET /metrics    Prometheus; where the cluster has keys, it requires the metrics token
    GET /health     200: the process runs
    GET /ready      200: the node takes requests; 503 with the reason: it loads its model, or drains

A scrape does not wait for the step thread: it reads the statistics that were published last. The
probes are open without a token, because what probes them has none; they show nothing of a request.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from http_serving.bounded_connections import ConnectionLimits
from http_serving.plain_paths import has_escaped_slash, path_problem
from http_serving.server import bind, make_server

BACKLOG = 16
GRACE_S = 1
NOT_READY_RETRY_S = "1"

# Few clients read metrics and probes, once a minute or more often.
LIMITS = ConnectionLimits(
    max_connections=16, max_head_bytes=16 << 10, request_timeout_s=10.0, idle_timeout_s=90.0
)


def bind_metrics(host: str, port: int) -> socket.socket:
    """Return a socket for the metrics, see `http_serving.server.bind`."""
    return bind(host, port, backlog=BACKLOG, purpose="for metrics")


class MetricsServer:
    """Serves `registry` and the probes on `listener`, from `start` to `stop`.

    `stop` closes the socket. `why_not_ready` returns an empty text when the node takes requests.
    With an empty `token` everybody may read the metrics.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        listener: socket.socket,
        why_not_ready: Callable[[], str],
        *,
        token: str,
    ) -> None:
        wanted = f"Bearer {token}".encode()

        async def metrics(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode("latin-1")
            if token and not hmac.compare_digest(given, wanted):
                return PlainTextResponse(
                    "wanted the header 'Authorization: Bearer TOKEN', with the token of the file "
                    "metrics.token\n",
                    status_code=401,
                    headers={"www-authenticate": "Bearer"},
                )
            return Response(
                generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST}
            )

        async def health(request: Request) -> Response:
            return JSONResponse({"status": "ok"})

        async def ready(request: Request) -> Response:
            reason = why_not_ready()
            if not reason:
                return JSONResponse({"status": "ready"})
            return JSONResponse(
                {"status": "not ready", "reason": reason},
                status_code=503,
                headers={"retry-after": NOT_READY_RETRY_S},
            )

        routes = [
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/ready", ready),
        ]
        self._listener = listener
        self._server = make_server(
            # A redirect would name whatever host the client named.
            _with_plain_paths(Router(routes, redirect_slashes=False)),
            limits=LIMITS,
            end_within_s=GRACE_S,
        )
        self._serving: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Begin to answer requests."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Finish the requests being answered, and close the socket."""
        self._server.should_exit = True
        try:
            if self._serving is not None:
                await self._serving
        finally:
            self._listener.close()


def _with_plain_paths(app: ASGIApp) -> ASGIApp:
    """Return `app`, which gets no request whose path may be read in two ways."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        problem = path_problem(scope)
        if problem or has_escaped_slash(scope):
            refusal = PlainTextResponse(f"{problem or 'the path has an escaped slash'}\n", 400)
            await refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    return serve
