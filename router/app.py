"""The router's web application: its routes, and errors of each in the shape of its API."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from common.addresses import is_loopback
from common.observing.clock import Clock, MonotonicClock
from common.observing.tracing import NO_TRACING, Tracing
from common.settings.config import Config
from common.version import VERSION
from router.access.api_key_book import ApiKeyBook
from router.access.api_key_metrics import ApiKeyCollector
from router.access.local_requests import LocalRequestMiddleware
from router.access.middleware import ApiKeyMiddleware, RequestIdMiddleware
from router.access.plain_requests import PlainRequestMiddleware
from router.access.refused_logins import RefusedLogins
from router.access.refused_requests import RefusedRequests
from router.api.answers.described_answers import (
    CHAT_ANSWER,
    CHAT_EVENT,
    COMPLETION_ANSWER,
    COMPLETION_EVENT,
    COUNT_RESPONSES,
    DETOKENIZE_BODY,
    DETOKENIZE_RESPONSES,
    MESSAGE_ANSWER,
    MESSAGE_ERROR,
    MODEL,
    MODELS,
    NAMED_EVENT,
    RESPONSE_ANSWER,
    TOKENIZE_BODY,
    TOKENIZE_RESPONSES,
    responses,
)
from router.api.bodies.messages.request import CountedBody, MessageBody
from router.api.bodies.responses.request import ResponseBody
from router.api.bodies.schemas import ChatBody, CompletionBody, WholeBody
from router.api.endpoints import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Endpoint
from router.api.generation import OpenAiApi
from router.api.planning.body_planner import BodyPlanner, Trials
from router.api.planning.process import LargeBodies
from router.api.tokenization import TokenizationApi
from router.cluster.cluster_routes import add_cluster_routes
from router.cluster.drain import DrainNode, add_drain_route
from router.core.cluster_view import ClusterView
from router.core.generation import Generator
from router.http.api_docs import add_api_docs
from router.http.described import (
    COMMON_ERRORS,
    PROBE_ERRORS,
    TEXT,
    Responses,
    described_body,
    error_responses,
    good_response,
    object_of,
    schema_of_model,
)
from router.http.documented_api import ServedModel
from router.http.errors import ApiError, ModelNotFound, error_json
from router.http.exchange import Exchange
from router.http.routes import Access, RouteTable, open_to, serve_route
from router.live.described_events import LIVE_RESPONSES
from router.live.feed import LiveFeed
from router.live.page import live_page
from router.text.text_model import TextModel
from router.watch.http_metrics import HttpMetrics
from router.watch.request_watch import RequestWatcher

logger = logging.getLogger("pdserve.router.http")

_GENERATION: tuple[tuple[Endpoint, type[WholeBody], Responses], ...] = (
    (CHAT, ChatBody, responses(CHAT_ANSWER, CHAT_EVENT)),
    (COMPLETIONS, CompletionBody, responses(COMPLETION_ANSWER, COMPLETION_EVENT)),
    (RESPONSES, ResponseBody, responses(RESPONSE_ANSWER, NAMED_EVENT, has_done=False)),
    (
        MESSAGES,
        MessageBody,
        responses(MESSAGE_ANSWER, NAMED_EVENT, MESSAGE_ERROR, has_done=False),
    ),
)


def create_app(
    *,
    config: Config,
    text_model: TextModel,
    large_bodies: LargeBodies,
    trials: Trials,
    generator: Generator,
    cluster: ClusterView,
    registry: CollectorRegistry,
    live: LiveFeed,
    drain_node: DrainNode,
    api_keys: ApiKeyBook | None = None,
    tracing: Tracing = NO_TRACING,
    clock: Clock | None = None,
) -> ASGIApp:
    """Return the whole HTTP edge as an ASGI application.

    `large_bodies`: plans the bodies that would hold up the event loop.

    `trials`: tries the grammars that are new.

    `registry`: receives the edge's metrics and is what `/metrics` shows.

    `api_keys`: who may do what; without it the configuration's one key, when it has one.

    `drain_node`: asks a node of the cluster to drain.

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
        separate_input_output_schemas=False,
    )
    chat = text_model.chat
    add_api_docs(app, ServedModel(text_model.name, chat.has_template, chat.knows_tools()))
    planner = BodyPlanner(text_model, large_bodies, trials)
    watcher = RequestWatcher(text_model.name, clock, tracing)
    api = OpenAiApi(
        config=config.api,
        text_model=text_model,
        planner=planner,
        generator=generator,
        cluster=cluster,
        metrics=HttpMetrics(registry, live.edge),
        clock=clock,
        watcher=watcher,
    )
    handlers = {
        endpoint.path: _add_generation(app, api, endpoint, body, answers)
        for endpoint, body, answers in _GENERATION
    }
    _add_models(app, text_model, api)
    _add_tokenization(app, TokenizationApi(config.api, text_model, planner, api, watcher, clock))
    _add_probes(app, registry)
    add_cluster_routes(app, cluster, live.serving)
    _add_live_page(app, live)
    add_drain_route(app, drain_node)
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


def _add_generation(
    app: FastAPI, api: OpenAiApi, endpoint: Endpoint, body: type[WholeBody], answers: Responses
) -> ASGIApp:
    """Describe the path; what is returned serves it, here and in `RouteTable`."""
    handle = partial(api.handle, endpoint)

    @open_to(Access.LIMITED)
    async def generate() -> Response:
        return Exchange(handle)

    app.post(
        endpoint.path,
        name=endpoint.name,
        description=body.__doc__,
        response_class=Response,
        responses=answers,
        openapi_extra=described_body(schema_of_model(body)),
    )(generate)
    return handle


def _add_models(app: FastAPI, text_model: TextModel, api: OpenAiApi) -> None:
    created_s = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": text_model.name,
            "object": "model",
            "created": created_s,
            "owned_by": "pdserve",
            "max_model_len": api.max_model_len,
        }

    every = {**good_response(MODELS, "The model that is served"), **COMMON_ERRORS}
    one = {**good_response(MODEL, "The model"), **COMMON_ERRORS, **error_responses(404)}
    path = {"name": "name", "in": "path", "required": True, "schema": TEXT}

    @app.get("/v1/models", response_model=None, responses=every)
    @open_to(Access.KEY)
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    # Any name is valid: declared to the framework, it would be described with a status 422.
    @app.get(
        "/v1/models/{name:path}",
        response_model=None,
        responses=one,
        openapi_extra={"parameters": [path]},
    )
    @open_to(Access.KEY)
    async def one_model(request: Request) -> dict[str, Any]:
        name = request.path_params["name"]
        if not text_model.is_called(name):
            raise ModelNotFound(name, text_model.name)
        return card()


def _add_tokenization(app: FastAPI, tokenization: TokenizationApi) -> None:
    @app.post(
        "/tokenize",
        description="The token ids of a prompt or of a conversation.",
        responses=TOKENIZE_RESPONSES,
        openapi_extra=TOKENIZE_BODY,
    )
    @open_to(Access.LIMITED)
    async def tokenize() -> Response:
        return Exchange(tokenization.tokenize)

    @app.post(
        "/detokenize",
        description="The text of token ids.",
        responses=DETOKENIZE_RESPONSES,
        openapi_extra=DETOKENIZE_BODY,
    )
    @open_to(Access.LIMITED)
    async def detokenize() -> Response:
        return Exchange(tokenization.detokenize)

    @app.post(
        "/v1/messages/count_tokens",
        description=CountedBody.__doc__,
        responses=COUNT_RESPONSES,
        openapi_extra=described_body(schema_of_model(CountedBody)),
    )
    @open_to(Access.LIMITED)
    async def count_tokens() -> Response:
        return Exchange(tokenization.count)


def _add_probes(app: FastAPI, registry: CollectorRegistry) -> None:
    healthy = good_response(object_of({"status": {"const": "ok"}}), "The process runs")
    named = good_response(object_of({"version": TEXT}), "The version of this router")
    measured = good_response(TEXT, "Metrics as Prometheus reads them", "text/plain")

    @app.get(
        "/health",
        description="The process runs.",
        response_model=None,
        responses=healthy | PROBE_ERRORS,
    )
    @open_to(Access.ANYBODY)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/version", response_model=None, responses=named | COMMON_ERRORS)
    @open_to(Access.KEY)
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics", response_class=Response, responses=measured | COMMON_ERRORS)
    @open_to(Access.METRICS)
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


def _add_live_page(app: FastAPI, live: LiveFeed) -> None:
    page = live_page()

    @app.get("/", include_in_schema=False)
    @open_to(Access.PAGE)
    async def show_page() -> Response:
        return Response(page.body, headers=dict(page.headers))

    @app.get(
        "/v1/live",
        description="What the live page shows, as server-sent events.",
        response_class=Response,
        responses=LIVE_RESPONSES | COMMON_ERRORS,
    )
    @open_to(Access.KEY)
    async def watch() -> Response:
        return Exchange(live.serve)


def _add_errors(app: FastAPI, refused: RefusedRequests) -> None:
    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        codes = {404: "not_found", 405: "method_not_allowed"}
        where = f"{request.method} {request.scope['path']}"
        wrong = ApiError(
            error.status_code,
            f"{where}: {error.detail}",
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
        media_type="application/json",
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
