"""Estimates when a request that is queued now would end, and refuses it if that is too late. Pure.

While requests wait, what leaves the queue in a second is the node's throughput, whatever limits it.
Where computing or blocks do, a request takes as long as its tokens; where seats do, its length
does not matter. If seats were free most of the time, tokens count. If not, both may limit, so the
queue is expected to last as long as the lesser of the two: a request that can be served is not
refused, and some wait in vain. For the same reason one more counts as having left, as the next one
may leave at once; and few say nothing.

The latest seconds count, and on a slow node the latest departures, so that the estimate follows the
load. What is known before an idle time is known after it, and the next departures correct it. Time
in which the node stood still is left out.
"""

from __future__ import annotations

from common.errors import DeadlineUnreachable
from common.request import GenerationRequest
from engine.core.sequences.waiting_queue import WaitingQueue
from node.flow.attempts.attempt_table import NodeAttempt
from node.flow.attempts.standstills import Standstills

_LATEST_S, _LATEST_LEFT = 15.0, 10
"""The time of queueing that counts, and how many departures do at least. What is earlier fades."""
_LATEST_OUTPUTS = 50
"""How many outputs count. Those before them fade."""
_LEAST = 3
"""Fewer departures, or outputs, say nothing: the first ones of many are seldom like the others."""
_LEAST_MEASURED_S = 1.0
"""A shorter time of queueing says nothing."""
_MOST_RETRY_AFTER_S = 60.0


class Shedding:
    """The throughput of the queue, and the length and pace of outputs. One thread uses it."""

    def __init__(self, standstills: Standstills) -> None:
        """Make it; it has `standstills` look at each turn."""
        self._num_left = 0.0
        self._left_tokens = 0.0
        self._measured_s = 0.0
        self._seatless_s = 0.0
        self._seen_at_s: float | None = None
        self._seen_num = 0
        self._seen_tokens = 0
        self._num_outputs = 0.0
        self._output_tokens = 0.0
        self._output_s = 0.0
        self._standstills = standstills

    def on_step(self, now_s: float, waiting: WaitingQueue, *, runs: bool, are_taken: bool) -> None:
        """Record how many have left the queue since the start, and whether any remain.

        `runs`: a step begins now. `are_taken`: all seats are.
        """
        self._standstills.look(now_s, is_busy=runs or bool(waiting))
        if self._seen_at_s is not None and now_s > self._seen_at_s:
            span_s = self._standstills.span_s(self._seen_at_s, now_s)
            self._measured_s += span_s
            self._seatless_s += span_s * are_taken
            self._num_left += waiting.num_taken - self._seen_num
            self._left_tokens += waiting.num_taken_tokens - self._seen_tokens
            self._fade()
        if self._seen_at_s is None or now_s > self._seen_at_s:
            self._seen_num, self._seen_tokens = waiting.num_taken, waiting.num_taken_tokens
        # Without a queue, what leaves it is what arrives: that measures the load, not the node.
        self._seen_at_s = now_s if waiting else None

    def _fade(self) -> None:
        """Scale what was measured to the latest seconds, or to the latest departures if these are
        fewer."""
        if self._measured_s > _LATEST_S and self._num_left > _LATEST_LEFT:
            kept = max(_LATEST_S / self._measured_s, _LATEST_LEFT / self._num_left)
            self._measured_s *= kept
            self._seatless_s *= kept
            self._num_left *= kept
            self._left_tokens *= kept

    def on_end(self, attempt: NodeAttempt, now_s: float) -> None:
        """Record a complete output: its length and its time."""
        self._standstills.look(now_s, is_busy=True)
        began_at_s = attempt.landed_at_s or attempt.first_token_at_s or now_s
        kept = min(1.0, _LATEST_OUTPUTS / (self._num_outputs + 1))
        span_s = self._standstills.span_s(began_at_s, now_s)
        self._num_outputs = kept * (self._num_outputs + 1)
        self._output_tokens = kept * (self._output_tokens + attempt.sequence.num_output)
        self._output_s = kept * (self._output_s + span_s)

    def _queue_s(self, num: int, num_tokens: int) -> float:
        """Return in how many seconds so many requests of so many tokens leave the queue; 0 if that
        is unknown."""
        if self._measured_s < _LEAST_MEASURED_S or self._num_left < _LEAST:
            return 0.0
        # In requests as they were on average.
        num_usual = num_tokens * self._num_left / self._left_tokens
        if self._seatless_s > self._measured_s / 2:
            num_usual = min(num_usual, num)
        return num_usual * self._measured_s / (self._num_left + 1)

    def _output_expected_s(self, max_tokens: int) -> float:
        """Return how long an output takes that is as long as the latest ones; 0 if that is
        unknown."""
        if self._num_outputs < _LEAST:
            return 0.0
        length = min(self._output_tokens / self._num_outputs, max_tokens)
        return length * self._output_s / self._output_tokens

    def refusal(
        self, request: GenerationRequest, waiting: WaitingQueue, *, is_prompt: bool = False
    ) -> DeadlineUnreachable | None:
        """Return why a request is refused: it would end after its deadline; else None.

        A request that continues an answer is never refused, nor one that finds no queue. Of a
        prompt that is sent on there is no output here.
        """
        if not waiting or request.output_token_ids:
            return None
        num_ahead, num_tokens = waiting.ahead(request.priority)
        queue_s = self._queue_s(num_ahead + 1, num_tokens + len(request.prompt_token_ids))
        if not queue_s:
            return None
        max_tokens = 0 if is_prompt else request.sampling.max_tokens
        expected_s = queue_s + self._output_expected_s(max_tokens)
        if expected_s <= request.deadline_s:
            return None
        late_s = expected_s - request.deadline_s
        return DeadlineUnreachable(
            f"the request would end in {expected_s:.1f} s, and its deadline is in "
            f"{request.deadline_s:.1f} s: {num_ahead} requests of {num_tokens} tokens "
            "wait before it",
            retry_after_s=min(max(late_s, 1.0), _MOST_RETRY_AFTER_S),
        )
