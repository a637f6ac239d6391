"""`/openapi.json`: the API's description, and `/docs`: a page of it, with all that the page loads.

The framework's own page loads scripts and styles from other hosts, which a cluster without the
internet does not reach. Here they are files of the package `fastapi_swagger`.
"""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.resources import files

from fastapi import FastAPI, HTTPException, Response
from fastapi.openapi.docs import get_swagger_ui_html

from router.http.documented_api import ServedModel, documented_api
from router.http.routes import Access, open_to
from router.http.sse import to_json

_PARTS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_KEPT = "public, max-age=86400"


def add_api_docs(app: FastAPI, model: ServedModel) -> None:
    """Add these routes to an app that has none of its own for its description."""

    @cache
    def description() -> str:
        return to_json(documented_api(app.openapi(), model))

    @app.get("/openapi.json", include_in_schema=False)
    @open_to(Access.KEY)
    async def openapi() -> Response:
        # Making it takes some tenths of a second once, in which streams go on.
        return Response(await asyncio.to_thread(description), media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    @open_to(Access.KEY)
    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title=f"{app.title}: the API",
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="/docs/favicon-32x32.png",
        )

    @app.get("/docs/{name}", include_in_schema=False)
    @open_to(Access.KEY)
    async def part(name: str) -> Response:
        if name not in _PARTS:
            raise HTTPException(404, f"no such part: wanted one of {', '.join(_PARTS)}")
        return Response(_part(name), media_type=_PARTS[name], headers={"cache-control": _KEPT})


@cache
def _part(name: str) -> bytes:
    return files("fastapi_swagger.resources").joinpath(name).read_bytes()
