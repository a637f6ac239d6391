"""One choice of a request, as its trace and its log line see it: attempts, and where they ran.

Told what `StageWatch` is told. A span per attempt; below it one for each reservation that was asked
for, and those that the nodes make themselves.
"""

from __future__ import annotations

from dataclasses import replace

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.request import FinishReason, GenerationRequest
from common.tracing import NO_SPAN, Span, SpanKind
from router.core.generation import RequestListener

_FINISHES = frozenset(reason.value for reason in FinishReason) - {FinishReason.ERROR.value}


class ChoiceWatch:
    """Everything is cheap when the request is not traced."""

    def __init__(self, request: RequestListener, choice_id: str) -> None:
        self._request = request
        self._is_traced = request.span.is_recording
        self._attempt = 0
        self._attempt_span: Span = NO_SPAN
        self._reserve_span: Span = NO_SPAN
        request.on_choice(choice_id)

    def on_choosing(
        self, attempt: AttemptId, now_s: float, *, is_reserved: bool, failure: PdserveError | None
    ) -> None:
        """Nodes are chosen; `failure` ended the attempt before, if there was one.

        With `is_reserved` the decode node said yes, and only a prefill node is wanted.
        """
        self._enter(attempt, failure, now_s)
        if self._is_traced:
            self._end_reserve("" if is_reserved else "refused", now_s)

    def on_reserve_asked(self, attempt: AttemptId, node: Incarnation, now_s: float) -> None:
        """A decode node was asked."""
        self._enter(attempt, None, now_s)
        if self._is_traced:
            self._end_reserve("refused", now_s)
            self._reserve_span = self._attempt_span.child("reserve", now_s, kind=SpanKind.CLIENT)
            self._reserve_span.set({"pdserve.node": node.node_id})

    def asks(self, request: GenerationRequest) -> GenerationRequest:
        """The request as it goes to a node: it names the attempt's span."""
        if not self._is_traced:
            return request
        return replace(request, traceparent=self._attempt_span.traceparent)

    def on_placed(
        self, decode: Incarnation | None, prefill: Incarnation | None, reason: str, now_s: float
    ) -> None:
        """The prompt is where it is computed, or on its way there."""
        for role, node in (("prefill", prefill), ("decode", decode)):
            if node is not None:
                self._request.on_node(node.node_id)
                self._attempt_span.set({f"pdserve.{role}_node": node.node_id})
        if self._is_traced:
            self._end_reserve("", now_s)
            self._attempt_span.set({"pdserve.placement_reason": reason})

    def on_end(self, outcome: str, now_s: float) -> None:
        """The choice is over: a finish reason, or an error's code."""
        if self._is_traced:
            error = "" if outcome in _FINISHES else outcome
            self._end_reserve(error, now_s)
            self._attempt_span.set({"pdserve.outcome": outcome})
            self._attempt_span.end(now_s, error=error)

    def _enter(self, attempt: AttemptId, failure: PdserveError | None, now_s: float) -> None:
        if attempt.attempt == self._attempt:
            return
        is_retry, self._attempt = self._attempt > 0, attempt.attempt
        if is_retry:
            self._request.on_retry()
        if not self._is_traced:
            return
        if is_retry:
            code = failure.code if failure is not None else "refused"
            self._end_reserve(code, now_s)
            self._attempt_span.end(now_s, error=code)
            self._request.span.event(
                "retry", now_s, {"pdserve.attempt": attempt.attempt, "error.type": code}
            )
        self._attempt_span = self._request.span.child("attempt", now_s)
        self._attempt_span.set(
            {"pdserve.request_id": attempt.request_id, "pdserve.attempt": attempt.attempt}
        )

    def _end_reserve(self, error: str, now_s: float) -> None:
        self._reserve_span.end(now_s, error=error)
        self._reserve_span = NO_SPAN
