"""`/` and `/v1/live`: the live page and its events."""

from __future__ import annotations

from fastapi import FastAPI, Response

from router.http.api_texts import CLUSTER
from router.http.described import COMMON_ERRORS, Responses, error_responses, good_response
from router.http.exchange import Exchange
from router.http.routes import Access, open_to
from router.http.sse import MEDIA_TYPE
from router.live.feed import LiveFeed
from router.live.page import live_page
from router.live.shapes import LiveEvents

_EVENTS: Responses = {
    **good_response(LiveEvents, "The history once, then a snapshot each second", MEDIA_TYPE),
    **error_responses(503, texts={503: "Too many viewers, or the router stops"}),
}


def add_live_routes(app: FastAPI, live: LiveFeed) -> None:
    """Add the routes to `app`."""
    page = live_page()

    @app.get("/", include_in_schema=False)
    @open_to(Access.PAGE)
    async def show_page() -> Response:
        return Response(page.body, headers=dict(page.headers))

    @app.get(
        "/v1/live",
        summary="What the live page shows, as events",
        tags=[CLUSTER],
        response_class=Response,
        responses=_EVENTS | COMMON_ERRORS,
    )
    @open_to(Access.KEY)
    async def watch() -> Response:
        return Exchange(live.serve)
