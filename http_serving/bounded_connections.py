"""Connections that hold nothing for ever: as many as a port affords, none that stays silent.

Bounding requests alone is not enough: a client that connects and says nothing has no request, and
neither has one whose headers never end, or who sends them a byte a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from http_serving.abort_connection import offer_abort
from http_serving.part_writing import offer_parts


class Refused(Enum):
    """Why a connection was closed without a request being answered."""

    TOO_MANY = "too_many"
    TOO_SLOW = "too_slow"
    HEAD_TOO_LARGE = "head_too_large"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The bounds of a port.

    A head is the request line and all headers: `max_head_bytes` and `max_headers` of them. From
    connecting, and from a request's first byte, until all of it is here `request_timeout_s` may
    pass; `idle_timeout_s` from an answer to the next request, and until a client has read the
    answer that its connection ends with.
    """

    max_connections: int
    request_timeout_s: float
    idle_timeout_s: float
    max_head_bytes: int = 64 << 10
    max_headers: int = 100


class BoundedConnection(HttpToolsProtocol):
    """One connection of a port.

    When there are too many, one that never asked anything is closed, else the one that has been
    idle longest; when all are being answered, the new one is.
    """

    def __init__(
        self,
        *args: Any,
        limits: ConnectionLimits,
        on_refused: Callable[[Refused], None] = lambda _: None,
        **kwargs: Any,
    ) -> None:
        """As uvicorn makes them; `on_refused` is told of every connection that got no answer."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._on_refused = on_refused
        self._has_asked = False
        self._idle_since_s = 0.0
        self._num_bare_bytes = 0
        self._is_head_too_large = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Room is made before the new connection is read from."""
        super().connection_made(transport)
        self._wait_for_request(self._limits.request_timeout_s)
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to wait for."""
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered here."""
        return self._timer is not None

    def data_received(self, data: bytes) -> None:
        """Bytes that are neither a body nor end a request are a head, or a trailer of one."""
        self._num_bare_bytes += len(data)
        super().data_received(data)
        if self._num_bare_bytes > self._limits.max_head_bytes and not self.transport.is_closing():
            self._is_head_too_large = True
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """With status 431 for a head that is too large."""
        if not self._is_head_too_large:
            self._on_refused(Refused.MALFORMED)
            super().send_400_response(msg)
            return
        self._on_refused(Refused.HEAD_TOO_LARGE)
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            b"connection: close\r\ncontent-length: 0\r\n\r\n"
        )
        self.transport.close()

    def on_message_begin(self) -> None:
        """A head begins; how long its connection was idle no longer counts."""
        super().on_message_begin()
        offer_abort(cast(dict[str, Any], self.scope), self.transport.abort)
        if self.is_idle:
            self._wait_for_request(self._limits.request_timeout_s)

    def on_headers_complete(self) -> None:
        """And is whole. An error ends the parser, which answers with `send_400_response`."""
        limits = self._limits
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > limits.max_head_bytes or len(self.headers) > limits.max_headers:
            self._is_head_too_large = True
            raise ValueError("the head of a request is too large")
        super().on_headers_complete()
        offer_parts(cast(dict[str, Any], self.scope), self.cycle)

    def on_body(self, body: bytes) -> None:
        """Bodies have a limit of their own, where they are read."""
        self._num_bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here: from now on it is this side that takes its time."""
        self._has_asked = True
        self._num_bare_bytes = 0
        if not self.cycle.response_complete:  # or it was answered before it was read to its end
            self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Idle again, unless the next request came meanwhile."""
        has_next = bool(self.pipeline)
        super().on_response_complete()
        if not has_next or self.transport.is_closing():
            self._wait_for_request(self._limits.idle_timeout_s)

    def _make_room(self) -> None:
        everyone = [cast(BoundedConnection, other) for other in self.connections]
        others = [other for other in everyone if not other.transport.is_closing()]
        if len(others) > self._limits.max_connections:
            idle = [other for other in others if other is not self and other.is_idle]
            victim = min(idle, key=lambda c: (c._has_asked, c._idle_since_s), default=self)
            self._on_refused(Refused.TOO_MANY)
            victim.transport.abort()

    def _wait_for_request(self, timeout_s: float) -> None:
        self._stop_timer()
        self._idle_since_s = self.loop.time()
        self._timer = self.loop.call_later(timeout_s, self._give_up)

    def _give_up(self) -> None:
        is_answered = self.cycle is not None and self.cycle.response_complete
        if self._num_bare_bytes or not is_answered:
            self._on_refused(Refused.TOO_SLOW)
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
