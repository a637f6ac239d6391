"""Without API keys a router on loopback serves programs of this machine, and no foreign web page.

A page in the user's browser may send requests to any address. Two checks stop it: a page's request
names the page's site as `Origin`, and a page that makes its own name resolve to 127.0.0.1 (DNS
rebinding) sends that name as `Host`.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from common.addresses import is_loopback
from router.access.refused_requests import RefusedRequests
from router.http.errors import ApiError
from router.http.exchange import Reply

_MAX_SHOWN = 64
_HOW = "add an API key (--api-key or --keys) to serve it, or --insecure to serve everybody"


class LocalRequestMiddleware:
    """Refuses, with 403, requests whose `Host` or `Origin` is neither localhost nor a loopback
    address. Pages of `allowed_origins` (`*`: all) are no foreign ones."""

    def __init__(
        self, app: ASGIApp, refused: RefusedRequests, allowed_origins: Collection[str]
    ) -> None:
        self.app = app
        self._refused = refused
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self.app(scope, receive, send)
        else:
            self._refused.on_refused(problem, scope)
            await Reply(send).send_error(problem, scope["path"])

    def _problem(self, scope: Scope) -> ApiError | None:
        for name, value in scope["headers"]:
            text = value.decode("latin-1")
            if name == b"host" and not _is_local(f"//{text}"):
                what = f"the Host header names {text[:_MAX_SHOWN]!r}"
                return _refused(f"{what}: without API keys only localhost is served; {_HOW}")
            if name == b"origin" and not self._is_allowed(text):
                what = f"a page of {text[:_MAX_SHOWN]!r} sent this request"
                return _refused(
                    f"{what}: without API keys only pages of localhost are served; {_HOW}, or its "
                    "origin to --cors-origins"
                )
        return None

    def _is_allowed(self, origin: str) -> bool:
        return _is_local(origin) or origin in self._allowed_origins or "*" in self._allowed_origins


def _is_local(url: str) -> bool:
    """Return whether the host of `url` is localhost, a name below it, or a loopback address."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return is_loopback(host) or host.endswith(".localhost")


def _refused(message: str) -> ApiError:
    return ApiError(403, message, code="foreign_host")
