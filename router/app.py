"""The router's web application: its routes, and errors of each in the shape of its API."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.addresses import is_loopback
from common.observing.clock import Clock, MonotonicClock
from common.observing.tracing import Tracing
from common.settings.config import Config
from router.access.api_key_book import ApiKeyBook
from router.access.api_key_metrics import ApiKeyCollector
from router.access.local_requests import LocalRequestMiddleware
from router.access.middleware import ApiKeyMiddleware, PlainRequestMiddleware, RequestIdMiddleware
from router.access.refused_logins import RefusedLogins
from router.access.refused_requests import RefusedRequests
from router.api.exchanges import Exchanges
from router.api.generation import OpenAiApi, add_generation_routes
from router.api.models import add_model_routes
from router.api.planning.body_planner import BodyPlanner, TriesGrammars
from router.api.planning.process import LargeBodies
from router.api.tokenization import TokenizationApi, add_tokenization_routes
from router.cluster.cluster_routes import add_cluster_routes
from router.cluster.drain import DrainNode, add_drain_route
from router.cluster.role import GiveRole, add_role_route
from router.core.cluster_view import ClusterView
from router.core.generation import Generator
from router.http.api_docs import add_api_docs
from router.http.documented_api import ServedModel
from router.http.errors import ApiError, error_json
from router.http.probes import add_probe_routes
from router.http.routes import RouteTable, path_meant, serve_route
from router.http.sse import JSON_TYPE
from router.live.feed import LiveFeed
from router.live.live_routes import add_live_routes
from router.text.text_model import TextModel
from router.watch.http_metrics import HttpMetrics
from router.watch.request_watch import RequestWatcher

logger = logging.getLogger("pdserve.router.http")


def create_app(
    *,
    config: Config,
    text_model: TextModel,
    large_bodies: LargeBodies,
    trials: TriesGrammars,
    generator: Generator,
    cluster: ClusterView,
    registry: CollectorRegistry,
    live: LiveFeed,
    drain_node: DrainNode,
    give_role: GiveRole,
    api_keys: ApiKeyBook | None,
    tracing: Tracing,
    clock: Clock | None = None,
) -> ASGIApp:
    """Return the whole HTTP edge as an ASGI application.

    `large_bodies`: plans the bodies that would hold up the event loop.

    `trials`: tries the grammars that are new.

    `registry`: receives the edge's metrics and is what `/metrics` shows.

    `api_keys`: who may do what; without it the configuration's one key, when it has one.

    `drain_node`: asks a node of the cluster to drain; `give_role`: to take another role.

    Starts nothing: the caller starts and stops the generator, the cluster view and the live feed,
    and closes `large_bodies` and `trials`.
    """
    clock = clock or MonotonicClock()
    app = FastAPI(
        title="pdserve",
        description="OpenAI-compatible API of a pdserve cluster",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # a redirect names whatever host the client named
    )
    chat = text_model.chat
    add_api_docs(app, ServedModel(text_model.name, chat.has_template, chat.knows_tools()))
    planner = BodyPlanner(text_model, large_bodies, trials)
    metrics = HttpMetrics(registry, live.edge)
    watcher = RequestWatcher(text_model.name, clock, tracing)
    exchanges = Exchanges(config.api, metrics, clock, watcher)
    api = OpenAiApi(
        config=config.api,
        text_model=text_model,
        planner=planner,
        generator=generator,
        cluster=cluster,
        metrics=metrics,
        clock=clock,
    )
    handlers = add_generation_routes(app, api, exchanges)
    add_model_routes(app, text_model, lambda: api.max_model_len)
    add_tokenization_routes(app, TokenizationApi(text_model, api), exchanges)
    add_probe_routes(app, registry)
    add_cluster_routes(app, cluster, live.serving)
    add_live_routes(app, live)
    add_drain_route(app, drain_node)
    add_role_route(app, give_role)
    refused = RefusedRequests(clock)
    _add_errors(app, refused)
    book = api_keys or ApiKeyBook(clock, api_key=config.api.api_key)
    registry.register(ApiKeyCollector(book))
    logins = RefusedLogins(clock, registry)
    return _guarded(RouteTable(app, handlers), config, book, logins, refused)


def _guarded(
    routes: RouteTable,
    config: Config,
    book: ApiKeyBook,
    logins: RefusedLogins,
    refused: RefusedRequests,
) -> ASGIApp:
    """Return what serves `routes`, behind its keys, its origins and the id of each request.

    These are around the framework and not inside of it, where more would stand before each request
    and around each event that is sent.
    """
    app: ASGIApp = ApiKeyMiddleware(serve_route, book, logins, refused)
    origins = config.api.allowed_origins
    serves_this_machine = is_loopback(config.server.host) and not config.security.insecure
    if book.is_open and serves_this_machine:
        app = LocalRequestMiddleware(app, refused, origins)
    app = PlainRequestMiddleware(app, routes, refused)
    if origins:
        # Outside of all that refuses, so that a page can read the refusal.
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("x-request-id", "retry-after"),
        )
    return RequestIdMiddleware(app)


def _add_errors(app: FastAPI, refused: RefusedRequests) -> None:
    paths = [route.path for route in app.routes if isinstance(route, Route)]

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        codes = {404: "not_found", 405: "method_not_allowed"}
        path = request.scope["path"]
        meant = path_meant(path, paths) if error.status_code == 404 else None
        hint = f": wanted {meant}" if meant else ""
        wrong = ApiError(
            error.status_code,
            f"{request.method} {path}: {error.detail}{hint}",
            code=codes.get(error.status_code, "http_error"),
            headers=dict(error.headers or {}),
        )
        refused.on_refused(wrong, request.scope)
        return _error_response(wrong, request.scope)

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        refused.on_refused(error, request.scope)
        return _error_response(error, request.scope)

    app.add_middleware(_LastResort)


def _error_response(error: ApiError, scope: Scope) -> Response:
    """Return an error in the shape of the API at the path of the request."""
    return Response(
        error_json(error, scope["path"]),
        status_code=error.status,
        headers=error.headers,
        media_type=JSON_TYPE,
    )


class _LastResort:
    """A bug in a small route becomes a logged 500 in the shape of its API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            logger.exception("%s failed", scope.get("path"))
            if started or scope["type"] != "http":
                raise
            error = ApiError(500, "the server failed on this request", code="internal_error")
            await _error_response(error, scope)(scope, receive, send)
