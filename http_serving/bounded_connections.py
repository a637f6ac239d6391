"""Connections with bounds: their number, the time without a request, the size of a head.

Bounds on requests are not enough: a client that connects and sends nothing has no request, nor has
one that sends headers without end or a byte a second.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from http_serving.abort_connection import offer_abort_of
from http_serving.half_closed import abort_when_gone, probe_of
from http_serving.offered_upgrades import OfferIgnoringParser, offers_upgrade
from http_serving.part_writing import offer_parts

_TOO_LARGE = b"The head of this request is larger, or has more headers, than this server takes."
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
)


class Refused(Enum):
    """Why a connection was closed without a request being answered."""

    TOO_MANY = "too_many"
    TOO_SLOW = "too_slow"
    HEAD_TOO_LARGE = "head_too_large"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The bounds of a port.

    A head is the request line and all headers: at most `max_head_bytes` and `max_headers`. A
    request must be complete `request_timeout_s` after the connection was made or after its first
    byte. `idle_timeout_s` may pass between an answer and the next request. `leaving_timeout_s` may
    pass until a client has read the last answer of its connection, or has sent the rest of a body
    that was answered before its end.
    """

    max_connections: int
    request_timeout_s: float
    idle_timeout_s: float
    leaving_timeout_s: float = 60.0
    max_head_bytes: int = 64 << 10
    max_headers: int = 100


class IdleConnections:
    """The connections of a port without a request in progress, longest idle first.

    Each operation takes constant time: with thousands of idle connections a new one costs no more
    than with none.
    """

    def __init__(self) -> None:
        self._never_asked: OrderedDict[BoundedConnection, None] = OrderedDict()
        self._has_asked: OrderedDict[BoundedConnection, None] = OrderedDict()
        self._leaving: set[BoundedConnection] = set()

    @property
    def num_leaving(self) -> int:
        """Connections that are closing and not lost yet."""
        return len(self._leaving)

    def add(self, connection: BoundedConnection, *, has_asked: bool) -> None:
        """Add a connection, which is idle from now on."""
        self.discard(connection)
        (self._has_asked if has_asked else self._never_asked)[connection] = None

    def discard(self, connection: BoundedConnection) -> None:
        """Remove a connection that has a request in progress, or is lost."""
        self._never_asked.pop(connection, None)
        self._has_asked.pop(connection, None)

    def leave(self, connection: BoundedConnection) -> None:
        """Take out a connection that is closing: the end of its answer may still be on its way."""
        self.discard(connection)
        self._leaving.add(connection)

    def on_lost(self, connection: BoundedConnection) -> None:
        """Forget a connection."""
        self.discard(connection)
        self._leaving.discard(connection)

    def leave_for(self, newest: BoundedConnection) -> BoundedConnection:
        """Take out the connection to close so that `newest` has room.

        That is one that never sent a request, else the one that has been idle longest; `newest`
        itself where every other one has a request in progress.
        """
        oldest = next((one for one in self._never_asked if one is not newest), None)
        victim = oldest or next(iter(self._has_asked), newest)
        self.leave(victim)
        return victim


class BoundedConnection(HttpToolsProtocol):
    """One connection of a port. When there are too many, `IdleConnections` names one to close."""

    def __init__(
        self,
        *args: Any,
        limits: ConnectionLimits,
        idle: IdleConnections,
        on_refused: Callable[[Refused], None],
        **kwargs: Any,
    ) -> None:
        """Make one from uvicorn's arguments. `idle` is shared by all connections of the port;
        `on_refused` is called when this one is closed unanswered."""
        super().__init__(*args, **kwargs)
        self.parser = OfferIgnoringParser(self)
        self._limits = limits
        self._idle = idle
        self._on_refused = on_refused
        self._has_asked = False
        self._num_bare_bytes = 0
        self._is_head_too_large = False
        self._is_in_body = False
        self._is_refused = False
        self._running: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close another connection, where there are too many, before this one is read."""
        super().connection_made(transport)
        self._wait_for_request(self._limits.request_timeout_s)
        if len(self.connections) - self._idle.num_leaving > self._limits.max_connections:
            self._on_refused(Refused.TOO_MANY)
            self._idle.leave_for(self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a closed connection, and tell the request in progress.

        uvicorn tells the newest request alone, which may wait behind that one.
        """
        self._stop_timer()
        self._idle.on_lost(self)
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._running is not None:
            _leave(self._running)
            self._running = None

    @property
    def is_idle(self) -> bool:
        """Whether no request of this connection is in progress."""
        return self._timer is not None

    def data_received(self, data: bytes) -> None:
        """Count bytes as head until `on_body` or the end of a request resets the count.

        Nothing is read any more after what is no request.
        """
        if self._is_refused:
            return
        self._num_bare_bytes += len(data)
        super().data_received(data)
        if self._num_bare_bytes > self._limits.max_head_bytes and not self.transport.is_closing():
            self._is_head_too_large = True
            self.send_400_response("")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: whole requests have no whole answers yet.

        Of TLS, Python's connections have no half that is closed.
        """
        latest = None if self.scheme == "https" else self._latest_whole()
        if latest is None:
            return False
        latest.keep_alive = False
        abort_when_gone(self.transport, self._probe)
        return True

    def _probe(self) -> bytes:
        return b"" if self._running is None else probe_of(self._running)

    def send_400_response(self, msg: str) -> None:
        """Answer 431 for a head that is too large, else 400, and close the connection.

        The requests before it are answered first: nothing may be written between parts of their
        answers, nor in place of one. The connection closes after the last of them.
        """
        if self._is_refused:
            return
        self._is_refused = True
        is_large = self._is_head_too_large
        self._on_refused(Refused.HEAD_TOO_LARGE if is_large else Refused.MALFORMED)
        if latest := self._latest_whole():
            latest.keep_alive = False
            # A connection that is closed with bytes unread is reset, and the answer may be lost.
            self.flow.resume_reading()
            return
        if self._is_in_body:
            _leave(self.cycle)
            if self.cycle.response_started:
                self.transport.close()
                return
        if not is_large:
            super().send_400_response(msg)
            return
        self.transport.write(_HEAD_TOO_LARGE)
        self.transport.close()

    def _latest_whole(self) -> RequestResponseCycle | None:
        """Return the latest request that came whole and has no whole answer, if there is one.

        One that waits, and whose body breaks off, is forgotten.
        """
        is_running_broken = self._is_in_body and not self.pipeline
        if self._is_in_body and self.pipeline:
            self.pipeline.popleft()
            self._is_in_body = False
        latest = self.pipeline[0][0] if self.pipeline else self._running
        if latest is None or latest.response_complete or is_running_broken:
            return None
        return latest

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        """Start the time for a request, in place of the idle time."""
        super().on_message_begin()
        if self.is_idle:
            self._wait_for_request(self._limits.request_timeout_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of a head. One behind a chunked body is dropped: it may have passed what
        checks heads (RFC 9110, section 6.5.1)."""
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the bounds of a complete head.

        Raises `ValueError` when it is too large, which the parser answers by `send_400_response`.
        """
        if offers_upgrade(self.parser):
            return
        limits = self._limits
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > limits.max_head_bytes or len(self.headers) > limits.max_headers:
            self._is_head_too_large = True
            raise ValueError("the head of a request is too large")
        super().on_headers_complete()
        self._is_in_body = True
        if self.scope["http_version"] < "1.1":
            _answer_plainly(self.cycle)
        offer_abort_of(self.cycle)
        offer_parts(cast(dict[str, Any], self.scope), self.cycle)

    def on_body(self, body: bytes) -> None:
        """Reset the count of head bytes; the application limits the size of bodies."""
        self._num_bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer, as the request is complete and in progress, or was answered before."""
        if offers_upgrade(self.parser):
            return
        self._has_asked = True
        self._is_in_body = False
        self._num_bare_bytes = 0
        if not self.cycle.response_complete:
            self._stop_timer()
        elif not self.transport.is_closing():
            self._wait_for_request(self._limits.idle_timeout_s)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the idle time, unless the next request has arrived already."""
        has_next = bool(self.pipeline)
        super().on_response_complete()
        limits = self._limits
        if self.transport.is_closing() or (self._is_in_body and not has_next):
            self._wait_for_request(limits.leaving_timeout_s)
        elif not has_next:
            self._wait_for_request(limits.idle_timeout_s)

    def _wait_for_request(self, timeout_s: float) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            self._idle.leave(self)
        else:
            self._idle.add(self, has_asked=self._has_asked)
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
            self._idle.discard(self)


def _leave(cycle: RequestResponseCycle) -> None:
    """Report to a request in progress that its client has disconnected."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


class _PlainCycle(RequestResponseCycle):
    """uvicorn's answer to a request of HTTP/1.0, which has no chunks.

    A body of unknown length ends with its connection (RFC 9112, section 6.1).
    """

    async def send(self, message: Any) -> None:
        """Send a part of the answer; one without a length is as long as what was sent of it."""
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = False
        elif self.chunked_encoding is False and not self.expected_content_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def _answer_plainly(cycle: RequestResponseCycle) -> None:
    """Make the answer one without chunks, and without `100 Continue`, before any of it is sent."""
    # uvicorn has no place to name another class of answers; the answer has not begun to run.
    cycle.__class__ = _PlainCycle
    cycle.waiting_for_100_continue = False
