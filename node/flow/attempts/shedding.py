"""Estimates when a request that is queued now would end, and refuses it if that is too late. Pure.

While requests wait, the tokens that leave the queue in a second are the node's throughput, whatever
limits it: computing, blocks or seats. A measurement loses half of its weight in some seconds, so
that the estimate follows the load. Time in which the node stood still is left out.
"""

from __future__ import annotations

from common.errors import DeadlineUnreachable
from common.request import GenerationRequest
from engine.core.sequences.waiting_queue import WaitingQueue
from node.flow.attempts.attempt_table import NodeAttempt
from node.flow.attempts.standstills import Standstills

_HALF_LIFE_S = 10.0
_LEAST_MEASURED_S = 1.0
"""A shorter time of queueing says nothing."""
_OUTPUT_WEIGHT = 0.98
"""The weight of all earlier outputs when one more has ended."""
_MOST_RETRY_AFTER_S = 60.0


class Shedding:
    """The throughput of the queue, and the length and pace of outputs. One thread uses it."""

    def __init__(self) -> None:
        self._taken_tokens = 0.0
        self._measured_s = 0.0
        self._seen_at_s: float | None = None
        self._seen_tokens = 0
        self._num_outputs = 0.0
        self._output_tokens = 0.0
        self._output_s = 0.0
        self._standstills = Standstills()

    def on_step(self, now_s: float, waiting: WaitingQueue, *, runs: bool) -> None:
        """Record how many tokens have left the queue since the start, and whether any remain.

        `runs`: a step begins now.
        """
        self._standstills.look(now_s, is_busy=runs or bool(waiting))
        num_taken_tokens = waiting.num_taken_tokens
        if self._seen_at_s is not None and now_s > self._seen_at_s:
            span_s = self._standstills.span_s(self._seen_at_s, now_s)
            weight = 0.5 ** (span_s / _HALF_LIFE_S)
            taken = num_taken_tokens - self._seen_tokens
            self._taken_tokens = self._taken_tokens * weight + taken
            self._measured_s = self._measured_s * weight + span_s
        if self._seen_at_s is None or now_s > self._seen_at_s:
            self._seen_tokens = num_taken_tokens
        # Without a queue, what leaves it is what arrives: that measures the load, not the node.
        self._seen_at_s = now_s if waiting else None

    def on_end(self, attempt: NodeAttempt, now_s: float) -> None:
        """Record a complete output: its length and its time."""
        self._standstills.look(now_s, is_busy=True)
        began_at_s = attempt.landed_at_s or attempt.first_token_at_s or now_s
        num_tokens = attempt.sequence.num_output
        span_s = self._standstills.span_s(began_at_s, now_s)
        self._num_outputs = self._num_outputs * _OUTPUT_WEIGHT + 1
        self._output_tokens = self._output_tokens * _OUTPUT_WEIGHT + num_tokens
        self._output_s = self._output_s * _OUTPUT_WEIGHT + span_s

    def _expected_s(self, num_tokens: int, max_tokens: int) -> float:
        """Return in how many seconds a request would end; 0 if that is unknown.

        `num_tokens` are its own and those before it. Its output is expected to be as long as the
        latest ones.
        """
        if self._measured_s < _LEAST_MEASURED_S or self._taken_tokens <= 0:
            return 0.0
        queue_s = num_tokens * self._measured_s / self._taken_tokens
        if not self._num_outputs:
            return queue_s
        length = min(self._output_tokens / self._num_outputs, max_tokens)
        return queue_s + length * self._output_s / self._output_tokens

    def refusal(
        self, request: GenerationRequest, waiting: WaitingQueue, *, is_prompt: bool = False
    ) -> DeadlineUnreachable | None:
        """Return why a request is refused: it would end after its deadline; else None.

        A request that continues an answer is never refused, nor one that finds no queue. Of a
        prompt that is sent on there is no output here.
        """
        if not waiting or request.output_token_ids:
            return None
        num_ahead = waiting.tokens_ahead(request.priority)
        num_tokens = len(request.prompt_token_ids)
        max_tokens = 0 if is_prompt else request.sampling.max_tokens
        expected_s = self._expected_s(num_ahead + num_tokens, max_tokens)
        if expected_s <= request.deadline_s:
            return None
        late_s = expected_s - request.deadline_s
        return DeadlineUnreachable(
            f"the request would end in {expected_s:.1f} s, and its deadline is in "
            f"{request.deadline_s:.1f} s: {num_ahead} tokens wait before it",
            retry_after_s=min(max(late_s, 1.0), _MOST_RETRY_AFTER_S),
        )
