"""`GET /v1/scaling`: how many nodes of each role the load wants, for people and autoscalers."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from router.core.cluster_view import ClusterView
from router.http.api_texts import CLUSTER
from router.http.described import COMMON_ERRORS, good_response
from router.http.routes import Access, open_to
from router.watch.scaling_report import ScalingAnswer


def add_scaling_route(app: FastAPI, cluster: ClusterView) -> None:
    """Add the route to `app`."""

    @app.get(
        "/v1/scaling",
        summary="How many nodes of each role the load wants",
        tags=[CLUSTER],
        description=_DESCRIPTION,
        responses=good_response(ScalingAnswer) | COMMON_ERRORS,
    )
    @open_to(Access.METRICS)
    async def describe_scaling() -> JSONResponse:
        return JSONResponse(cluster.scaling())


_DESCRIPTION = (
    "The nodes that the targets of latency need and want, by role, from what all nodes reported in "
    "the last seconds; the same numbers are in the metrics `pdserve_scaling_…`."
)
