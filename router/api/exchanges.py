"""Exchanges with clients, of every endpoint that reads a body: seats, one deadline, and ends.

One request, in order: one deadline for everything that follows, the body, a seat (or 429), the
answer. A client that leaves, an error and the deadline all end the answer before the seat is given
back. An error is a status where none was sent, else the last event, in the shape of the API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive, Scope, Send

from common.errors import DeadlineExceeded, Overloaded
from common.observing.clock import Clock
from common.observing.logs import log_fields
from common.settings.config import ApiConfig
from http_serving.abort_connection import abort_connection
from http_serving.part_writing import part_writer
from router.access.spaced_lines import client_address
from router.api.sessions import SessionHeaders
from router.core.generation import SHUTTING_DOWN
from router.http.errors import ApiError, TooManyRequests, api_error
from router.http.exchange import ClientClosed, Reply, read_body, while_client_waits
from router.text.chat.chat_template import TemplateRefused
from router.watch.edge_counters import RequestError
from router.watch.http_metrics import HttpMetrics
from router.watch.request_watch import Operation, RequestWatch, RequestWatcher

logger = logging.getLogger("pdserve.router.http")

ADMIN_SEATS = 8
"""Seats for administrators only, who must get answers when all other seats are taken."""

FINAL_EVENT_TIMEOUT_S = 1.0
"""How long the last event of a broken stream may wait for a client that does not read."""


Answer = Callable[[bytes, str, RequestWatch, Reply], Coroutine[Any, Any, None]]
"""Answers a body of a client, which is a key or an address, by the reply; or raises."""


class Exchanges:
    """The exchanges of one router, which share its seats."""

    def __init__(
        self, config: ApiConfig, metrics: HttpMetrics, clock: Clock, watcher: RequestWatcher
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._watcher = watcher
        self._session_headers = SessionHeaders()
        self._num_in_progress = 0
        metrics.in_progress.set_function(lambda: self._num_in_progress)

    async def serve_exchange(
        self,
        name: str,
        operation: Operation | None,
        answer: Answer,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        max_body: int | None = None,
    ) -> None:
        """Serve one request, errors included. Raises only when the server itself is stopping.

        `name` is that of metrics and logs, `operation` that of traces: a request without one asks
        nothing of a model, and is not counted. A body has at most `max_body` bytes; None: those of
        the configuration.
        """
        reply = Reply(send, part_writer(scope))
        outcome, why, failure = "cancelled", "", None
        watch = self._watcher.begin(name, operation, scope)
        watch.session_name = self._session_headers.name(scope["headers"])
        try:
            self.require_seat(scope)
            await self._answered(answer, scope, receive, reply, watch, max_body)
            outcome = "ok"
        except ClientClosed:
            outcome = "client_closed"
        except asyncio.CancelledError:
            # The server waits no longer; a client that still does may ask elsewhere.
            await _report(scope, reply, api_error(Overloaded(SHUTTING_DOWN)), watch)
            raise
        except Exception as error:
            wrong = api_error(error)
            outcome = wrong.code
            # What may quote a conversation is not logged.
            why = "" if isinstance(error, TemplateRefused) else wrong.message
            failure = RequestError(
                at_s=self._clock.now_s(),
                endpoint=name,
                request_id=watch.request_id,
                status=wrong.status,
                code=wrong.code,
                text=why,
            )
            if wrong.status == 500:
                logger.exception(
                    "request failed: %s", error, extra=log_fields(request_id=watch.request_id)
                )
            await _report(scope, reply, wrong, watch)
            del wrong  # where it is `error` itself, its traceback holds this frame: a cycle
        finally:
            if operation is not None:
                self._metrics.ends.count(name, outcome, failure)
            watch.end(outcome, reply.status, self._clock.now_s(), why=why)

    def require_seat(self, scope: Scope) -> None:
        """Raise `TooManyRequests` where no seat is free; also called before a body is read.

        A few seats are kept for administrators, who are known by their keys.
        """
        state = scope.get("state", {})
        num_kept = ADMIN_SEATS if state.get("is_admin") and state.get("api_key_name") else 0
        limit = self._config.max_concurrent_requests
        if self._num_in_progress >= limit + num_kept:
            raise TooManyRequests(limit)

    @contextmanager
    def _seat(self, scope: Scope) -> Iterator[None]:
        """Hold one of the places for requests in progress, whose bodies are here.

        Raises `TooManyRequests` without any.
        """
        self.require_seat(scope)
        self._num_in_progress += 1
        try:
            yield
        finally:
            self._num_in_progress -= 1

    async def _answered(
        self,
        answer: Answer,
        scope: Scope,
        receive: Receive,
        reply: Reply,
        watch: RequestWatch,
        max_body: int | None,
    ) -> None:
        timeout_s = self._config.request_timeout_s
        client = watch.api_key_name or client_address(scope)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                body = await read_body(scope, receive, max_body or self._config.max_body)
                with self._seat(scope):
                    work = answer(body, client, watch, reply)
                    await while_client_waits(receive, work)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the request was not done within {timeout_s:g} s, the most this server allows"
            ) from None


async def _report(scope: Scope, reply: Reply, error: ApiError, watch: RequestWatch) -> None:
    """Report the error with a status, or in the last event when the status was already sent.

    The connection of a client that does not read is closed, and what it has not read is dropped.
    """
    if not reply.is_started:
        await reply.send_error(error, scope["path"])
        return
    try:
        async with asyncio.timeout(FINAL_EVENT_TIMEOUT_S):
            await reply.end_stream(reply.error_event(error))
    except TimeoutError:
        logger.info(
            "a client that does not read was not told: %s",
            error.code,
            extra=log_fields(request_id=watch.request_id),
        )
        abort_connection(scope)
