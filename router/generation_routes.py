"""The paths that carry the load, served before the framework looks at them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class GenerationRoutes:
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
