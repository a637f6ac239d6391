"""One HTTP exchange over ASGI: a bounded body in, one reply out, detection of lost clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from common.errors import InvalidRequest
from http_serving.part_writing import WritePart, writes_nothing
from router.http.errors import ApiError, BodyTooLarge, error_event, error_json
from router.http.sse import JSON_TYPE, MEDIA_TYPE

RawHeaders = tuple[tuple[bytes, bytes], ...]


def _raw(headers: dict[str, str]) -> RawHeaders:
    return tuple(
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    )


_STREAM_HEADERS = _raw(
    {"content-type": MEDIA_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no"}
)


class ClientClosed(Exception):
    """The client closed the connection, so no answer is needed."""


class JsonAnswer(JSONResponse):
    """A small answer in JSON."""

    media_type = JSON_TYPE


_OF_CODEX = " (of Codex: features.enable_request_compression = false)"
"""Codex compresses bodies wherever it is logged in to its maker's service."""


class Exchange(Response):
    """A request handled whole: the framework, which has no limit, does not read its body."""

    def __init__(self, handle: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handle(scope, receive, send)


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body, at most `max_bytes`.

    A longer one is refused by its Content-Length before any of it is read, and a chunked one as
    soon as it exceeds the limit. Raises `BodyTooLarge`, `InvalidRequest` and `ClientClosed`.
    """
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit():
                raise InvalidRequest("the Content-Length header is not a number")
            if len(value) > 18 or int(value) > max_bytes:
                raise BodyTooLarge(max_bytes)
        if name == b"content-encoding" and value.lower() != b"identity":
            encoding = value[:40].decode("latin-1")
            raise InvalidRequest(
                f"the body's Content-Encoding is {encoding!r}: wanted plain JSON{_OF_CODEX}"
            )
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientClosed
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def while_client_waits(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it as soon as the client is gone (`ClientClosed`).

    Returns or raises only after `work` has ended, for whatever reason.
    """
    job = asyncio.current_task()
    assert job is not None
    is_gone = has_ended = False

    def on_gone(watcher: asyncio.Task[None]) -> None:
        nonlocal is_gone
        # The work may just have ended when this is called; then there is nothing to cancel.
        if not has_ended and not watcher.cancelled():
            watcher.exception()  # a connection that cannot be watched counts as lost
            is_gone = True
            job.cancel()

    watcher = asyncio.create_task(_client_gone(receive))
    watcher.add_done_callback(on_gone)
    try:
        await work
    except asyncio.CancelledError:
        # Another task may have cancelled it as well; then the cancellation is passed on.
        if is_gone and job.uncancel() == 0:
            raise ClientClosed from None
        raise
    finally:
        has_ended = True
        watcher.cancel()


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """The one answer of an exchange. `is_started`: `status` was sent already.

    `error_event` makes the last event of a stream that failed, in the shape of the request's API.
    """

    def __init__(self, send: Send, write_part: WritePart = writes_nothing) -> None:
        """Make a reply; `write_part` writes to the connection directly, if possible."""
        self._send = send
        self._write_part = write_part
        self.error_event: Callable[[ApiError], bytes] = error_event
        self.is_started = False
        self.status: int | None = None

    async def start_stream(self) -> None:
        """Send status 200 and the headers of an event stream that no proxy should buffer."""
        await self._start(200, _STREAM_HEADERS)

    def try_write(self, data: bytes) -> bool:
        """Write a part now and return True, or return False with nothing written.

        A part can be written once the stream has begun, while its client keeps up.
        """
        return self.is_started and self._write_part(data)

    async def send_part(self, data: bytes) -> None:
        """Send a part; wait while the client reads too slowly."""
        if data and not self.try_write(data):
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes) -> None:
        """Send the last part."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def send_json(
        self, text: str, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Send a whole answer."""
        await self.send_json_bytes(text.encode(), status=status, headers=headers)

    async def send_json_bytes(
        self, data: bytes, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Send a whole answer in one piece: nothing is held for a client that does not read it."""
        base = {"content-type": JSON_TYPE, "content-length": str(len(data))}
        await self._start(status, _raw(base | (headers or {})))
        await self.end_stream(data)

    async def send_error(self, error: ApiError, path: str = "") -> None:
        """Send an error in the shape of the API at `path`."""
        text = error_json(error, path)
        await self.send_json(text, status=error.status, headers=error.headers)

    async def _start(self, status: int, headers: RawHeaders) -> None:
        self.is_started = True
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
