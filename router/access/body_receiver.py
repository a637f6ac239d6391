"""Receives the body of one request: in its place among those that arrive, until it is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Receive

from router.access.arriving_bodies import Arrival, ArrivingBodies
from router.http.errors import ApiError


class BodyLetGo(ApiError):
    """The body had not arrived when others needed its place; its connection is closed."""

    def __init__(self) -> None:
        super().__init__(
            408,
            "the body stood still while too many others arrived: send it again, in one piece",
            code="body_too_slow",
            headers={"connection": "close"},
        )


class BodyReceiver:
    """An ASGI `receive` that holds a place while the body arrives. `end` it with the request.

    `on_whole` is called once, when the last part has come; what it raises ends the request.
    """

    def __init__(
        self,
        receive: Receive,
        bodies: ArrivingBodies,
        owner: str,
        on_whole: Callable[[], None] = lambda: None,
    ) -> None:
        self._receive = receive
        self._bodies = bodies
        self._owner = owner
        self._on_whole = on_whole
        self._arrival: Arrival | None = None
        self._is_over = self._is_let_go = False
        self._waiting: asyncio.Task[Any] | None = None

    async def __call__(self) -> Message:
        """Return the next message. Raises `BodyLetGo`, and what `on_whole` raises."""
        if self._is_over:
            return await self._receive()
        arrival = self._arrival
        if arrival is None:
            arrival = self._arrival = self._bodies.begin(self._owner, self._let_go)
        message = await self._next()
        is_part = message["type"] == "http.request"
        if is_part:
            self._bodies.grow(arrival, len(message.get("body", b"")))
            if self._is_let_go:
                raise BodyLetGo
        if not is_part or not message.get("more_body", False):
            self.end()
            if is_part:
                self._on_whole()
        return message

    def end(self) -> None:
        """Give the place back. Idempotent."""
        self._is_over = True
        # Dropped, because it holds this receiver: each request would be a cycle.
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            self._bodies.end(arrival)

    async def _next(self) -> Message:
        waiting = self._waiting = asyncio.current_task()
        try:
            return await self._receive()
        except asyncio.CancelledError:
            # Another task may have cancelled it as well; then the cancellation is passed on.
            if self._is_let_go and waiting is not None and waiting.uncancel() == 0:
                raise BodyLetGo from None
            raise
        finally:
            self._waiting = None

    def _let_go(self) -> None:
        self._is_let_go = True
        if self._waiting is not None:
            self._waiting.cancel()
