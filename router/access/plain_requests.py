"""The first look at a request: its path is plain, and its rights are those of the route it has."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from http_serving.plain_paths import MAX_SHOWN_CHARS, has_escaped_slash, path_problem
from router.access.refused_requests import RefusedRequests
from router.http.errors import ApiError
from router.http.exchange import Reply
from router.http.routes import RouteTable, put_route


class PlainRequestMiddleware:
    """Refuses, with 400, requests whose path is not plain, and notes the route of all others."""

    def __init__(self, app: ASGIApp, routes: RouteTable, refused: RefusedRequests) -> None:
        self._app = app
        self._routes = routes
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = path_problem(scope)
        route = self._routes.find(scope)
        if not problem and not route.takes_slashes and has_escaped_slash(scope):
            problem = f"the path {scope['path'][:MAX_SHOWN_CHARS]!r} has an escaped slash"
        if problem:
            error = ApiError(
                400,
                f"{problem}: wanted the path of an endpoint, written as in /openapi.json",
                code="bad_path",
            )
            self._refused.on_refused(error, scope)
            await Reply(send).send_error(error, scope["path"])
            return
        put_route(scope, route)
        await self._app(scope, receive, send)
