"""`/health`, `/version` and `/metrics`: the process itself."""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from typing_extensions import TypedDict

from common.version import VERSION
from router.http.api_texts import HEALTH, MODELS
from router.http.described import COMMON_ERRORS, PROBE_ERRORS, good_response
from router.http.exchange import JsonAnswer
from router.http.routes import Access, open_to


class Health(TypedDict):
    status: Literal["ok"]


class Version(TypedDict):
    version: str


_MEASURED = good_response(str, "Metrics as Prometheus reads them", "text/plain")


def add_probe_routes(app: FastAPI, registry: CollectorRegistry) -> None:
    """Add the routes to `app`; `/metrics` shows `registry`."""

    @app.get(
        "/health",
        summary="Whether the process runs",
        tags=[HEALTH],
        responses=good_response(Health) | PROBE_ERRORS,
    )
    @open_to(Access.ANYBODY)
    async def health() -> JsonAnswer:
        return JsonAnswer(Health(status="ok"))

    @app.get(
        "/version",
        summary="The version of this router",
        tags=[MODELS],
        responses=good_response(Version) | COMMON_ERRORS,
    )
    @open_to(Access.KEY)
    async def version() -> JsonAnswer:
        return JsonAnswer(Version(version=VERSION))

    @app.get(
        "/metrics",
        summary="Prometheus metrics",
        tags=[HEALTH],
        response_class=Response,
        responses=_MEASURED | COMMON_ERRORS,
    )
    @open_to(Access.METRICS)
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})
