"""Access to routes: declared beside the route, and looked up from the matched route.

Nothing else decides about rights, so no way to write a path leads to a route without its rights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.convertors import PathConvertor
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_VERSION = "/v1"
_ACCESS = "pdserve_access"
_ROUTE = "matched_route"

AnyEndpoint = TypeVar("AnyEndpoint", bound=Callable[..., Any])


class Access(Enum):
    """Who may call a route where keys are configured."""

    ANYBODY = "anybody"
    """Probes, open without a key: they show nothing of any request."""

    PAGE = "page"
    """The live page, open without a key: it asks for the key itself, and shows no data before."""

    METRICS = "metrics"
    """Clients with a key, and Prometheus: the metrics token opens these routes and no others."""

    KEY = "key"
    """Clients with a key."""

    LIMITED = "limited"
    """Clients with a key, within its limits: requests that nodes or the router compute."""

    ADMIN = "admin"
    """Clients with an administrator's key."""


def open_to(access: Access) -> Callable[[AnyEndpoint], AnyEndpoint]:
    """Declare who may call the route of an endpoint: a decorator below the route's own."""

    def declare(endpoint: AnyEndpoint) -> AnyEndpoint:
        vars(endpoint)[_ACCESS] = access
        return endpoint

    return declare


@dataclass(frozen=True, slots=True)
class MatchedRoute:
    """The route of a request: who may call it, and what serves it.

    `takes_slashes`: a name in its path may hold slashes, which clients escape.
    """

    access: Access
    serve: ASGIApp
    takes_slashes: bool = False


class RouteTable:
    """The routes of an application, matched as the framework matches them."""

    def __init__(self, app: FastAPI, direct: Mapping[str, ASGIApp]) -> None:
        """Serve POST to the paths of `direct`, which are routes of `app`, without the framework:
        its routing takes longer than the rest of the edge, and it wraps `send`, which is called
        for every event of a stream.

        Raises `TypeError` for a route that does not declare who may call it.
        """
        self.routes = [(route, _declared(route, app)) for route in app.routes]
        self._direct = {
            path: replace(self._found("POST", path), serve=serve) for path, serve in direct.items()
        }
        self._none = MatchedRoute(Access.KEY, app)

    def find(self, scope: Scope) -> MatchedRoute:
        """Return the route of a request, which the application then serves.

        Where there is none, or none for this method, a client with a key gets an error. HEAD is
        served where GET is.
        """
        if scope["method"] == "POST":
            direct = self._direct.get(scope["path"])
            if direct is not None:
                return direct
        if scope["method"] == "HEAD":
            found = self.find({**scope, "method": "GET"})
            return replace(found, serve=_head_of(found.serve)) if found is not self._none else found
        for route, declared in self.routes:
            if route.matches(scope)[0] is Match.FULL:
                return declared
        return self._none

    def _found(self, method: str, path: str) -> MatchedRoute:
        scope: Scope = {"type": "http", "method": method, "path": path}
        return next(found for route, found in self.routes if route.matches(scope)[0] is Match.FULL)


def _head_of(serve: ASGIApp) -> ASGIApp:
    """Return what answers HEAD as `serve` answers GET, without the body, and ends there."""

    async def serve_head(scope: Scope, receive: Receive, send: Send) -> None:
        is_over = False

        async def send_head(message: Message) -> None:
            nonlocal is_over
            if message["type"] == "http.response.start":
                await send(message)
            elif not is_over:
                is_over = True  # a stream has no other end: its client is gone, from here on
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await serve({**scope, "method": "GET"}, receive, send_head)

    return serve_head


def _declared(route: BaseRoute, app: ASGIApp) -> MatchedRoute:
    access = vars(route.endpoint).get(_ACCESS) if isinstance(route, Route) else None
    if not isinstance(route, Route) or access is None:
        raise TypeError(f"{route} does not declare who may call it: wanted open_to(…)")
    convertors = route.param_convertors.values()
    return MatchedRoute(access, app, any(isinstance(one, PathConvertor) for one in convertors))


def path_meant(path: str, paths: Collection[str]) -> str | None:
    """Return the one of `paths` that a client meant with `path`, if it is like one.

    Many base addresses lack the `/v1`, have it twice or where there is none, or have a prefix or a
    slash too many.
    """
    plain = path.rstrip("/")
    for one in (plain, plain.removeprefix(_VERSION)):
        if one in paths:
            return one
    versioned = [one for one in paths if one.startswith(_VERSION)]
    found = [one for one in versioned if plain.endswith(one.removeprefix(_VERSION))]
    return max(found, key=len, default=None)


def put_route(scope: Scope, route: MatchedRoute) -> None:
    """Note the route of a request, for whatever decides about it or serves it."""
    scope.setdefault("state", {})[_ROUTE] = route


def matched_route(scope: Scope) -> MatchedRoute:
    """Return the route of a request. Raises `KeyError` for one that was never matched."""
    route: MatchedRoute = scope["state"][_ROUTE]
    return route


async def serve_route(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request by the route that was noted: the application behind all middleware."""
    await matched_route(scope).serve(scope, receive, send)
