"""`/openapi.json`: the API's description, and `/docs`: a page of it, with all that the page loads.

The framework's own page loads scripts and styles from other hosts, which a cluster without the
internet does not reach. Here they are files of the package `fastapi_swagger`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from fastapi import FastAPI, HTTPException, Response
from fastapi.openapi.docs import get_swagger_ui_html

from router.http.documented_api import ServedModel, documented_api
from router.http.routes import Access, open_to
from router.http.sse import JSON_TYPE, to_json

_PARTS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_KEPT = "public, max-age=86400"


def add_api_docs(app: FastAPI, model: ServedModel) -> None:
    """Add these routes to an app that has none of its own for its description."""

    description = _MadeOnce(lambda: to_json(documented_api(app.openapi(), model)))

    @app.get("/openapi.json", include_in_schema=False)
    @open_to(Access.KEY)
    async def openapi() -> Response:
        return Response(await description.text(), media_type=JSON_TYPE)

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


class _MadeOnce:
    """A text that takes some tenths of a second to make, in which streams go on.

    It is made on one thread, however many clients ask for it before it is there.
    """

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._making: asyncio.Task[str] | None = None

    async def text(self) -> str:
        """Return the text. Raises what making it raises; the next call makes it again then."""
        making = self._making
        if making is None or (making.done() and making.exception() is not None):
            making = self._making = asyncio.create_task(asyncio.to_thread(self._make))
        # A client that hangs up does not end it: others wait for it too.
        return await asyncio.shield(making)


@cache
def _part(name: str) -> bytes:
    return files("fastapi_swagger.resources").joinpath(name).read_bytes()
