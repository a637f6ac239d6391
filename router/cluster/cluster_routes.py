"""`/ready`, `/v1/cluster` and `/v1/scaling`: what a router knows of its cluster."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from router.cluster.shapes import READY_RESPONSES, ClusterAnswer, ScrapeTarget
from router.core.cluster_view import ClusterView
from router.http.api_texts import CLUSTER, HEALTH
from router.http.described import COMMON_ERRORS, good_response
from router.http.exchange import JsonAnswer
from router.http.routes import Access, open_to
from router.live.shapes import Serving
from router.watch.scaling_report import ScalingAnswer

NOT_READY_RETRY_S = "1"
_SCALING = (
    "The nodes that the targets of latency need and want, by role, from what all nodes reported in "
    "the last seconds; the same numbers are in the metrics `pdserve_scaling_…`."
)


def add_cluster_routes(app: FastAPI, cluster: ClusterView, serving: Callable[[], Serving]) -> None:
    """Add the routes to `app`; `serving` tells how this router has served recently."""

    @app.get(
        "/ready",
        summary="Whether a request can be served",
        tags=[HEALTH],
        responses=READY_RESPONSES,
    )
    @open_to(Access.ANYBODY)
    async def ready() -> JsonAnswer:
        if cluster.is_ready():
            warnings = cluster.warnings()
            return JsonAnswer({"status": "ready"} | ({"warnings": warnings} if warnings else {}))
        return JsonAnswer(
            {"status": "not ready", "reason": cluster.why_not_ready()},
            status_code=503,
            headers={"retry-after": NOT_READY_RETRY_S},
        )

    @app.get(
        "/v1/cluster/targets",
        summary="The nodes, for Prometheus' HTTP discovery",
        tags=[HEALTH],
        responses=good_response(list[ScrapeTarget]) | COMMON_ERRORS,
    )
    @open_to(Access.METRICS)
    async def scrape_targets() -> JsonAnswer:
        return JsonAnswer(cluster.scrape_targets())

    @app.get(
        "/v1/cluster",
        summary="The nodes, their loads, the latest placements",
        tags=[CLUSTER],
        responses=good_response(ClusterAnswer) | COMMON_ERRORS,
    )
    @open_to(Access.KEY)
    async def describe_cluster() -> JsonAnswer:
        return JsonAnswer({**cluster.describe(), "serving": serving()})

    @app.get(
        "/v1/scaling",
        summary="How many nodes of each role the load wants",
        tags=[CLUSTER],
        description=_SCALING,
        responses=good_response(ScalingAnswer) | COMMON_ERRORS,
    )
    @open_to(Access.METRICS)
    async def describe_scaling() -> JsonAnswer:
        return JsonAnswer(cluster.scaling())
