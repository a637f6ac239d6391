"""One choice of a request in the cluster: its stages, its attempts, its spans.

The stages of the first token are timed for every choice. A traced request gets a span per attempt;
below it one for each reservation that was requested, and those that the nodes make.
"""

from __future__ import annotations

from dataclasses import replace

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.observing.tracing import NO_SPAN, Span, SpanKind
from common.request import FinishReason, GenerationRequest
from router.core.generation import RequestListener
from router.core.ttft_stages import DispatchStages, Stage
from router.watch.recent_placements import REFUSED, RETRIED, RecentPlacement, RecentPlacements

_FINISHES = frozenset(reason.value for reason in FinishReason) - {FinishReason.ERROR.value}


class ChoiceTrace:
    """The trace of a choice. Without tracing it costs a few clock readings per attempt."""

    def __init__(
        self, request: RequestListener, choice_id: str, recent: RecentPlacements, now_s: float
    ) -> None:
        """Begin at `now_s`; `choice_id` is the id that nodes use. Placements go into `recent`."""
        self._request = request
        self._recent = recent
        self._placements: list[RecentPlacement] = []
        self._is_traced = request.span.is_recording
        self._attempt = 0
        self._attempt_span: Span = NO_SPAN
        self._reserve_span: Span = NO_SPAN
        self._began_at_s = self._attempt_at_s = self._since_s = now_s
        self._placing_s = self._reserve_s = 0.0
        self._is_reserving = False
        request.on_choice(choice_id)

    def on_choosing(
        self, attempt: AttemptId, now_s: float, *, is_reserved: bool, failure: PdserveError | None
    ) -> None:
        """Record that nodes are chosen: at the start, after a refusal, or for another attempt.

        `failure` ended the attempt before, if there was one. With `is_reserved` the decode node
        granted its reservation, and only a prefill node is missing.
        """
        self._enter(attempt, failure, now_s)
        self._placing_s += self._lap(now_s)
        self._end_reserve("" if is_reserved else "refused", now_s)

    def on_reserve_asked(self, attempt: AttemptId, node: Incarnation, now_s: float) -> None:
        """Record that a decode node was asked for a reservation."""
        self._enter(attempt, None, now_s)
        self._placing_s += self._lap(now_s)
        self._end_reserve("refused", now_s)
        self._is_reserving = True
        if self._is_traced:
            self._reserve_span = self._attempt_span.child("reserve", now_s, kind=SpanKind.CLIENT)
            self._reserve_span.set({"pdserve.node": node.node_id})

    def asks(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request for a node, which contains the attempt's span."""
        if not self._is_traced:
            return request
        return replace(request, traceparent=self._attempt_span.traceparent)

    def on_placed(
        self,
        attempt: AttemptId,
        decode: Incarnation | None,
        prefill: Incarnation | None,
        reason: str,
        now_s: float,
    ) -> None:
        """Record that the prompt was sent to the node that computes it."""
        self._enter(attempt, None, now_s)
        for earlier in self._placements:
            if earlier.attempt == attempt:  # its prefill node refused
                self._recent.end(earlier, REFUSED, duration_s=now_s - self._began_at_s)
        placement = RecentPlacement(
            attempt=attempt,
            request_id=self._request.request_id,
            decode=decode,
            prefill=prefill,
            reason=reason,
            at_s=now_s,
        )
        self._placements.append(placement)
        self._recent.add(placement)
        for role, node in (("prefill", prefill), ("decode", decode)):
            if node is not None:
                self._request.on_node(node.node_id)
                self._attempt_span.set({f"pdserve.{role}_node": node.node_id})
        if self._is_reserving:
            self._reserve_s += self._lap(now_s)
        else:
            self._placing_s += self._lap(now_s)
        self._end_reserve("", now_s)
        if self._is_traced:
            self._attempt_span.set({"pdserve.placement_reason": reason})

    def on_first_token(self, now_s: float, *, queue_s: float, compute_s: float) -> DispatchStages:
        """Return the stages up to token 0, whose node reports both spans of its prompt."""
        prompt_s = self._lap(now_s)
        computed_s = min(max(compute_s, 0.0), prompt_s)
        queued_s = min(max(queue_s, 0.0), prompt_s - computed_s)
        return DispatchStages(
            self._began_at_s,
            now_s,
            {
                Stage.RETRIES: self._attempt_at_s - self._began_at_s,
                Stage.PLACING: self._placing_s,
                Stage.RESERVE: self._reserve_s,
                Stage.PREFILL_QUEUE: queued_s,
                Stage.PREFILL_COMPUTE: computed_s,
                Stage.DELIVERY: prompt_s - queued_s - computed_s,
            },
        )

    def on_end(self, outcome: str, attempt: AttemptId, num_tokens: int, now_s: float) -> None:
        """Record the end of the choice: a finish reason, or an error's code.

        `attempt` is the one whose tokens the client got, `num_tokens` in all.
        """
        self._end_placements(outcome, attempt, num_tokens, now_s)
        if self._is_traced:
            error = "" if outcome in _FINISHES else outcome
            self._end_reserve(error, now_s)
            self._attempt_span.set({"pdserve.outcome": outcome})
            self._attempt_span.end(now_s, error=error)

    def _end_placements(
        self, outcome: str, attempt: AttemptId, num_tokens: int, now_s: float
    ) -> None:
        """End what is in progress; the attempt that answered, else the last one, has `outcome`."""
        duration_s = now_s - self._began_at_s
        left = [one for one in self._placements if not one.outcome]
        answering = next(
            (one for one in left if one.attempt == attempt), left[-1] if left else None
        )
        for one in left:
            if one is answering:
                self._recent.end(one, outcome, num_tokens=num_tokens, duration_s=duration_s)
            else:
                self._recent.end(one, RETRIED, duration_s=duration_s)

    def _enter(self, attempt: AttemptId, failure: PdserveError | None, now_s: float) -> None:
        """Begin another attempt; the time of earlier ones counts as retries."""
        if attempt.attempt <= self._attempt:  # also the first of two that run at once
            return
        is_retry, self._attempt = self._attempt > 0, attempt.attempt
        if is_retry:
            self._attempt_at_s = self._since_s = now_s
            self._placing_s = self._reserve_s = 0.0
            self._request.on_retry()
        if self._is_traced:
            self._enter_span(attempt, is_retry, failure, now_s)
        self._is_reserving = False

    def _enter_span(
        self, attempt: AttemptId, is_retry: bool, failure: PdserveError | None, now_s: float
    ) -> None:
        if is_retry:
            code = failure.code if failure is not None else "refused"
            self._end_reserve(code, now_s)
            self._attempt_span.end(now_s, error=code)
            self._request.span.event(
                "retry", now_s, {"pdserve.attempt": attempt.attempt, "error.type": code}
            )
        self._attempt_span = self._request.span.child("attempt", now_s)
        self._attempt_span.set(
            {"pdserve.choice_id": attempt.choice_id, "pdserve.attempt": attempt.attempt}
        )

    def _end_reserve(self, error: str, now_s: float) -> None:
        self._is_reserving = False
        self._reserve_span.end(now_s, error=error)
        self._reserve_span = NO_SPAN

    def _lap(self, now_s: float) -> float:
        lap_s, self._since_s = now_s - self._since_s, now_s
        return lap_s
