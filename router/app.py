"""The router's web application: its routes, and errors in OpenAI's shape for all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from common.addresses import is_loopback
from common.clock import Clock, MonotonicClock
from common.config import Config
from common.tracing import NO_TRACING, Tracing
from common.version import VERSION
from router.access.api_key_book import ApiKeyBook
from router.access.api_key_metrics import ApiKeyCollector
from router.access.local_requests import LocalRequestMiddleware
from router.access.middleware import ApiKeyMiddleware, RequestIdMiddleware
from router.access.refused_logins import RefusedLogins
from router.access.refused_requests import RefusedRequests
from router.cluster.drain import DrainNode, add_drain_route
from router.core.cluster_view import ClusterView
from router.core.generation import Generator
from router.http.api_docs import add_api_docs
from router.http.errors import ApiError, ModelNotFound
from router.http.exchange import Exchange
from router.live.feed import LiveFeed
from router.live.page import live_page
from router.openai.api import OpenAiApi
from router.openai.described_answers import (
    CHAT_ANSWER,
    CHAT_EVENT,
    COMPLETION_ANSWER,
    COMPLETION_EVENT,
    MESSAGE_ANSWER,
    MESSAGE_ERROR,
    NAMED_EVENT,
    RESPONSE_ANSWER,
    error_responses,
    responses,
)
from router.openai.endpoints import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Endpoint
from router.openai.messages.request import MessageBody
from router.openai.planning import BodyPlanner
from router.openai.planning_process import LargeBodies
from router.openai.responses.request import ResponseBody
from router.openai.schemas import ChatBody, CompletionBody, WholeBody
from router.openai.tokenization import TokenizationApi
from router.text.text_model import TextModel
from router.watch.http_metrics import HttpMetrics
from router.watch.request_watch import RequestWatcher

logger = logging.getLogger("pdserve.router.http")

NOT_READY_RETRY_S = "1"

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
Answers = dict[int | str, dict[str, Any]]
"""What an endpoint answers, by status, as OpenAPI describes it."""

_GENERATION: tuple[tuple[Endpoint, type[WholeBody], Answers], ...] = (
    (CHAT, ChatBody, responses(CHAT_ANSWER, CHAT_EVENT)),
    (COMPLETIONS, CompletionBody, responses(COMPLETION_ANSWER, COMPLETION_EVENT)),
    (RESPONSES, ResponseBody, responses(RESPONSE_ANSWER, NAMED_EVENT)),
    (MESSAGES, MessageBody, responses(MESSAGE_ANSWER, NAMED_EVENT, MESSAGE_ERROR)),
)


def create_app(
    *,
    config: Config,
    text_model: TextModel,
    large_bodies: LargeBodies,
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

    `registry`: receives the edge's metrics and is what `/metrics` shows.

    `api_keys`: who may do what; without it the configuration's one key, when it has one.

    `drain_node`: asks a node of the cluster to drain.

    Starts nothing: the caller starts and stops the generator, the cluster view and the live feed,
    and closes `large_bodies`.
    """
    clock = clock or MonotonicClock()
    app = FastAPI(
        title="pdserve",
        description="OpenAI-compatible API of a pdserve cluster",
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        separate_input_output_schemas=False,
        responses=error_responses(401),
    )
    add_api_docs(app)
    planner = BodyPlanner(text_model, large_bodies)
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
    _add_probes(app, cluster, registry)
    _add_live_page(app, live)
    add_drain_route(app, drain_node)
    refused = RefusedRequests(clock)
    _add_errors(app, refused)
    book = api_keys or ApiKeyBook(clock, api_key=config.api.api_key)
    registry.register(ApiKeyCollector(book))
    logins = RefusedLogins(clock, registry)
    return _guarded(_GenerationRoutes(app, handlers), config, book, logins, refused)


def _guarded(
    app: ASGIApp,
    config: Config,
    book: ApiKeyBook,
    logins: RefusedLogins,
    refused: RefusedRequests,
) -> ASGIApp:
    """Return `app` behind its keys, its origins and the id of each request.

    These are around the framework and not inside of it, where more would stand before each request
    and around each event that is sent.
    """
    app = ApiKeyMiddleware(app, book, logins, refused)
    origins = config.api.allowed_origins
    serves_this_machine = is_loopback(config.server.host) and not config.security.insecure
    if book.is_open and serves_this_machine:
        app = LocalRequestMiddleware(app, refused, origins)
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
    app: FastAPI, api: OpenAiApi, endpoint: Endpoint, body: type[WholeBody], answers: Answers
) -> Handler:
    """Describe the path; what is returned serves it, here and in `_GenerationRoutes`."""
    handle = partial(api.handle, endpoint)

    async def generate() -> Response:
        return Exchange(handle)

    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, definitions)}}
    app.post(
        endpoint.path,
        name=endpoint.name,
        description=body.__doc__,
        response_class=Response,
        responses=answers,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )(generate)
    return handle


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace the local references of `schema`, so that the API's description can hold it alone."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


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

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != text_model.name:
            raise ModelNotFound(name, text_model.name)
        return card()


def _add_tokenization(app: FastAPI, tokenization: TokenizationApi) -> None:
    @app.post("/tokenize", description="The token ids of a prompt or of a conversation.")
    async def tokenize() -> Response:
        return Exchange(tokenization.tokenize)

    @app.post("/detokenize", description="The text of token ids.")
    async def detokenize() -> Response:
        return Exchange(tokenization.detokenize)


def _add_probes(app: FastAPI, cluster: ClusterView, registry: CollectorRegistry) -> None:
    @app.get("/health", description="The process runs.")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", description="A request that arrives now has somewhere to run.")
    async def ready() -> JSONResponse:
        if cluster.is_ready():
            warnings = cluster.warnings()
            return JSONResponse({"status": "ready"} | ({"warnings": warnings} if warnings else {}))
        return JSONResponse(
            {"status": "not ready", "reason": cluster.why_not_ready()},
            status_code=503,
            headers={"retry-after": NOT_READY_RETRY_S},
        )

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/v1/cluster/targets", description="The nodes, for Prometheus' HTTP discovery.")
    async def scrape_targets() -> JSONResponse:
        return JSONResponse(cluster.scrape_targets())

    @app.get("/v1/cluster")
    async def describe_cluster() -> JSONResponse:
        return JSONResponse(cluster.describe())


def _add_live_page(app: FastAPI, live: LiveFeed) -> None:
    page = live_page()

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def show_page() -> Response:
        return Response(page.body, headers=dict(page.headers))

    @app.get("/v1/live", description="What the live page shows, as server-sent events.")
    async def watch() -> Response:
        return Exchange(live.serve)


def _add_errors(app: FastAPI, refused: RefusedRequests) -> None:
    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        codes = {404: "not_found", 405: "method_not_allowed"}
        where = f"{request.method} {request.url.path}"
        wrong = ApiError(
            error.status_code,
            f"{where}: {error.detail}",
            code=codes.get(error.status_code, "http_error"),
            headers=dict(error.headers or {}),
        )
        refused.on_refused(wrong, request.scope)
        return _error_response(wrong)

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        refused.on_refused(error, request.scope)
        return _error_response(error)

    app.add_middleware(_LastResort)


def _error_response(error: ApiError) -> Response:
    return Response(
        error.as_json(),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


class _GenerationRoutes:
    """Calls a path's handler for POST; everything else goes on to the application.

    A framework's routing takes longer than the rest of the edge, and it wraps `send`, which is
    called for every event of a stream.
    """

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler]) -> None:
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST":
            handler = self._handlers.get(scope["path"])
        await (handler or self._app)(scope, receive, send)


class _LastResort:
    """A bug in a small route becomes a logged 500 in OpenAI's shape."""

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
            await _error_response(error)(scope, receive, send)
