"""Middleware around every request: its id, its path, and the API key with its limits."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.ids import new_id
from http_serving.plain_paths import MAX_SHOWN_CHARS, has_escaped_slash, path_problem
from router.access.api_key_book import ApiKeyBook, KeyInUse
from router.access.api_keys import ApiKey
from router.access.arriving_bodies import ArrivingBodies
from router.access.body_receiver import BodyReceiver
from router.access.key_limits import Limit, Refusal
from router.access.refused_logins import LoginRefusal, RefusedLogins
from router.access.refused_requests import RefusedRequests
from router.access.spaced_lines import client_address
from router.http.errors import ApiError
from router.http.exchange import Reply
from router.http.routes import Access, RouteTable, matched_route, put_route

REQUEST_ID = b"x-request-id"
GOOD_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
"""A client's id of a request that is kept; another one is replaced."""


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


class RequestIdMiddleware:
    """Answers with the `x-request-id` of the request, or a new one when it has no usable one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _header(scope, REQUEST_ID)
        if not GOOD_REQUEST_ID.fullmatch(request_id):
            request_id = new_id("req").encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            await send(message)

        await self.app(scope, receive, send_with_id)


class PlainRequestMiddleware:
    """Refuses, with 400, requests whose path is not plain, and notes the route of all others.

    It comes first: the rights to a request are those of the route that it has.
    """

    def __init__(self, app: ASGIApp, routes: RouteTable, refused: RefusedRequests) -> None:
        self.app = app
        self.routes = routes
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        problem = path_problem(scope)
        route = self.routes.find(scope)
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
        await self.app(scope, receive, send)


class ApiKeyMiddleware:
    """Admits requests with a valid key as bearer token, within the limits of that key.

    The application finds `api_key_name`, `api_key_sha256` and `is_admin` in the scope's state. If
    no keys are configured everyone is an administrator without a name. A body arrives in a place of
    its own; a request counts as one of its key when the body is whole.
    """

    def __init__(
        self,
        app: ASGIApp,
        book: ApiKeyBook,
        refused_logins: RefusedLogins,
        refused: RefusedRequests,
    ) -> None:
        self.app = app
        self._book = book
        self._refused_logins = refused_logins
        self._refused = refused
        self._bodies = ArrivingBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        _note(state, self._book.key_when_open(_bearer(scope)))
        if self._book.is_open:
            owner = state["api_key_name"] or client_address(scope)
            await self._serve(BodyReceiver(receive, self._bodies, owner), scope, send)
            return
        given = _bearer(scope)
        used = self._book.find(given) if given else None
        if used is None:
            await self._serve_without_key(given, scope, receive, send)
            return
        _note(state, used.key)
        access = matched_route(scope).access
        if access is Access.ADMIN and not used.key.is_admin:
            self._refused_logins.on_refused(LoginRefusal.NOT_ADMIN, scope, used.key.name)
            await Reply(send).send_error(_not_admin(used.key.name))
        elif access is Access.LIMITED:
            await self._serve_limited(used, scope, receive, send)
        else:
            await self._serve(BodyReceiver(receive, self._bodies, used.key.name), scope, send)

    async def _serve_without_key(
        self, given: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        match matched_route(scope).access:
            case Access.PAGE:
                await self.app(scope, receive, _with_status_401(send))
                return
            case Access.ANYBODY:
                await self.app(scope, receive, send)
                return
            case Access.METRICS if self._book.is_metrics_token(given):
                await self.app(scope, receive, send)
                return
        reason = LoginRefusal.WRONG_KEY if given else LoginRefusal.NO_KEY
        self._refused_logins.on_refused(reason, scope)
        await Reply(send).send_error(_unauthorized(bool(given)), scope["path"])

    async def _serve_limited(
        self, used: KeyInUse, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run the application under the key's limits; it returns when the answer has ended.

        A key that is at a limit is refused before its body is read. What is read is counted then,
        so that nothing is held by a body that does not come.
        """
        refusal = self._book.refusal(used)
        if refusal is not None:
            error = _too_many(used, refusal)
            self._refused.on_refused(error, scope)
            await Reply(send).send_error(error, scope["path"])
            return
        is_taken = False

        def take() -> None:
            nonlocal is_taken
            refusal = self._book.take(used)
            if refusal is not None:
                raise _too_many(used, refusal)
            is_taken = True

        try:
            await self._serve(BodyReceiver(receive, self._bodies, used.key.name, take), scope, send)
        finally:
            if is_taken:
                used.limits.release()

    async def _serve(self, body: BodyReceiver, scope: Scope, send: Send) -> None:
        try:
            await self.app(scope, body, send)
        finally:
            body.end()


def _note(state: MutableMapping[str, Any], key: ApiKey) -> None:
    state["api_key_name"], state["api_key_sha256"] = key.name, key.sha256
    state["is_admin"] = key.is_admin


def _bearer(scope: Scope) -> bytes:
    """Return the key as a bearer token, or where Anthropic's clients send it."""
    scheme, _, given = _header(scope, b"authorization").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else _header(scope, b"x-api-key").strip()


def _with_status_401(send: Send) -> Send:
    async def send_401(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            headers = [*message["headers"], (b"www-authenticate", b"Bearer")]
            message = {**message, "status": 401, "headers": headers}
        await send(message)

    return send_401


def _unauthorized(has_key: bool) -> ApiError:
    what = "the API key is not the right one" if has_key else "no API key was given"
    return ApiError(
        401,
        f"{what}: send the header 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _not_admin(name: str) -> ApiError:
    return ApiError(
        403,
        f"the API key {name!r} is not an administrator's: add one with `pdserve api-keys add "
        "FILE NAME --admin`",
        code="not_admin",
    )


def _too_many(used: KeyInUse, refusal: Refusal) -> ApiError:
    key = used.key
    why = {
        Limit.RATE: f"may send {key.requests_per_minute} requests per minute",
        Limit.CONCURRENCY: f"may have {key.max_concurrent} requests in progress",
    }
    return ApiError(
        429,
        f"the API key {key.name!r} {why[refusal.limit]}: try again in {refusal.retry_after_s} s",
        code="rate_limit_exceeded",
        headers={"retry-after": str(refusal.retry_after_s)},
    )
