"""Attempts that ended on a node, as log lines at DEBUG and as spans.

The step thread only passes them on, at the end of its turn. Log lines and spans are made on the
event loop.
"""

from __future__ import annotations

import asyncio
import logging

from common.observing.clock import Clock
from common.observing.logs import log_fields
from common.observing.tracing import Tracing, trace_id_of
from node.flow.attempts.attempt_table import AttemptTable, NodeAttempt
from node.watch.attempt_spans import record_attempt

log = logging.getLogger("pdserve.node.attempts")


class AttemptWatch:
    """Watches a table where traces or DEBUG lines are on; else it costs one comparison a turn."""

    def __init__(
        self,
        attempts: AttemptTable,
        tracing: Tracing,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        self._attempts = attempts
        self._tracing = tracing
        self._loop = loop
        self._clock = clock
        if tracing.is_on or log.isEnabledFor(logging.DEBUG):
            attempts.keep_ended()

    def look(self) -> None:
        """Pass on the attempts that ended since the last call; on the step thread."""
        ended = self._attempts.take_ended()
        if ended:
            self._loop.call_soon_threadsafe(self._report, ended, self._clock.now_s())

    def _report(self, ended: list[NodeAttempt], now_s: float) -> None:
        for attempt in ended:
            _log_end(attempt, now_s)
            if attempt.sequence.request.traceparent:
                record_attempt(self._tracing, attempt, now_s)


def _log_end(attempt: NodeAttempt, now_s: float) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    sequence = attempt.sequence
    log.debug(
        "an attempt ended: %s",
        attempt.outcome,
        extra=log_fields(
            attempt.id,
            trace_id=trace_id_of(sequence.request.traceparent),
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached_tokens,
            output_tokens=sequence.num_output,
            duration_ms=round((now_s - attempt.received_at_s) * 1e3, 1),
        ),
    )
