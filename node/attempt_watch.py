"""Attempts that ended on a node, as log lines at DEBUG and as spans.

The step thread only hands them over, at the end of its turn; what is said about them is put
together on the event loop.
"""

from __future__ import annotations

import asyncio
import logging

from common.clock import Clock
from common.logs import log_fields
from common.tracing import Tracing, trace_id_of
from node.attempt_spans import record_attempt
from node.request_book import Held, RequestBook

log = logging.getLogger("pdserve.node.attempts")


class AttemptWatch:
    """Watches a book when somebody wants to know; else it costs one comparison a turn."""

    def __init__(
        self, book: RequestBook, tracing: Tracing, loop: asyncio.AbstractEventLoop, clock: Clock
    ) -> None:
        self._book = book
        self._tracing = tracing
        self._loop = loop
        self._clock = clock
        if tracing.is_on or log.isEnabledFor(logging.DEBUG):
            book.keep_ended()

    def look(self) -> None:
        """Hand over what has ended since the last call; on the step thread."""
        ended = self._book.take_ended()
        if ended:
            self._loop.call_soon_threadsafe(self._report, ended, self._clock.now_s())

    def _report(self, ended: list[Held], now_s: float) -> None:
        for held in ended:
            _log_end(held, now_s)
            if held.sequence.request.traceparent:
                record_attempt(self._tracing, held, now_s)


def _log_end(held: Held, now_s: float) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    sequence = held.sequence
    log.debug(
        "an attempt ended: %s",
        held.outcome,
        extra=log_fields(
            held.attempt,
            trace_id=trace_id_of(sequence.request.traceparent),
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached_tokens,
            output_tokens=sequence.num_output,
            duration_ms=round((now_s - held.received_at_s) * 1e3, 1),
        ),
    )
