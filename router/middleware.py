"""Around every request: an id that shows up on both sides, and the API key."""

from __future__ import annotations

import hmac
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.ids import new_request_id
from router.exchange import Reply
from router.openai_errors import ApiError

REQUEST_ID = b"x-request-id"
_GOOD_ID = re.compile(rb"[\x21-\x7e]{1,128}")

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
"""What probes, Prometheus and a browser may see without a key: nothing of any request."""


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


class RequestIdMiddleware:
    """Answers carry the `x-request-id` of the request, or a new one when it has no usable one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _header(scope, REQUEST_ID)
        if not _GOOD_ID.fullmatch(request_id):
            request_id = new_request_id().encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Refuses what does not carry the key as a bearer token; compares in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, given = _header(scope, b"authorization").partition(b" ")
            is_bearer = scheme.lower() == b"bearer"
            if not hmac.compare_digest(given.strip(), self._key) or not is_bearer:
                await Reply(send).send_error(_unauthorized(bool(given)))
                return
        await self._app(scope, receive, send)


def _unauthorized(has_key: bool) -> ApiError:
    what = "the API key is not the right one" if has_key else "no API key was given"
    return ApiError(
        401,
        f"{what}: send the header 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
