"""The attempts on a node: their routers, deadlines, leases, and the outputs to report. Pure.

Time comes in as arguments.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.request import (
    NO_COUNTS,
    NO_DETAILS,
    FinishReason,
    OutputDetails,
    RequestCounts,
    RequestOutput,
)
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_results import StepOutput
from kv_transfer.transfer_timing import TransferTiming
from node.flow.messages import Answer, AnswerCall, CallRefused, SendOutput, Submit

MAX_CLOSED_ATTEMPTS = 8192
MAX_DEAD_DEADLINES = 64
HANDED_OFF = "handed_off"
RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class NodeAttempt:
    """One attempt on this node. `lease_token` identifies its landing or transfer, if it has one.

    `is_prompt`: it is over here with token 0, as its router asked for; otherwise it is a
    reservation, decoded here to its end.

    The first step with some of its prompt began at `computing_since_s`, the step that drew token 0
    ended at `first_token_at_s`, and KV from another node landed at `landed_at_s`. `num_chunks` is
    the number of steps that computed some of the prompt. `outcome` is empty until the attempt ends:
    a finish reason, an error's code or `handed_off`.
    """

    id: AttemptId
    router: Incarnation
    sequence: Sequence
    deadline_at_s: float
    received_at_s: float
    is_prompt: bool = False
    computing_since_s: float | None = None
    first_token_at_s: float | None = None
    lease_token: int | None = None
    pull_token: int | None = None
    """The lease token of the pull that its prompt waits for."""
    waits_for_room: bool = False
    """Its prompt waits for a pull that has not begun."""
    num_pulled_tokens: int = 0
    """Tokens of its prompt that were pulled for it."""
    answer: Answer | None = None
    waiting_replies: list[int] = field(default_factory=list)
    num_pushed_blocks: int = 0
    num_chunks: int = 0
    landed_at_s: float | None = None
    transfer: TransferTiming | None = None
    outcome: str = ""
    sent_counts: RequestCounts = NO_COUNTS
    """The counts that its router received last."""
    is_over: bool = False
    """It ended for the router. It stays in the table until its transfer has released the blocks."""

    @property
    def waits_for_pull(self) -> bool:
        """Whether its prompt is not queued yet, because of a pull."""
        return self.waits_for_room or self.pull_token is not None

    def take_waiting_replies(self) -> list[int]:
        """Return the calls that wait for an answer; afterwards none does."""
        waiting, self.waiting_replies = self.waiting_replies, []
        return waiting

    def prompt_spans_s(self) -> tuple[float, float]:
        """Return the seconds from the call to the first step, and from there to token 0.

        Raises `ValueError` before token 0.
        """
        if self.computing_since_s is None or self.first_token_at_s is None:
            raise ValueError(f"{self.id} has no token 0 yet")
        queue_s = max(self.computing_since_s - self.received_at_s, 0.0)
        return queue_s, self.first_token_at_s - self.computing_since_s


class AttemptTable:
    """Attempts by id, by sequence, by router, by lease and by deadline.

    The ids of closed attempts are remembered, up to a bound: an abort may overtake its request.
    """

    def __init__(self) -> None:
        self._attempts: dict[AttemptId, NodeAttempt] = {}
        self._by_sequence: dict[int, NodeAttempt] = {}
        self._by_lease: dict[int, NodeAttempt] = {}
        self._by_router: dict[Incarnation, dict[AttemptId, NodeAttempt]] = {}
        self._deadlines: list[tuple[float, int]] = []
        """Deadlines and sequence ids; the id of an attempt comes again after a refusal."""
        self._closed: OrderedDict[AttemptId, None] = OrderedDict()
        self._ended: deque[NodeAttempt] | None = None

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def num_leases(self) -> int:
        """The number of attempts with an open landing or transfer."""
        return len(self._by_lease)

    @property
    def num_routers(self) -> int:
        """The number of routers with attempts here."""
        return len(self._by_router)

    @property
    def num_deadlines(self) -> int:
        """The number of deadlines in memory, those of attempts that have ended among them."""
        return len(self._deadlines)

    def add(self, attempt: NodeAttempt) -> None:
        """Add an attempt. Raises `ValueError` when its id is in the table."""
        if attempt.id in self._attempts:
            raise ValueError(f"{attempt.id} is in the table already")
        self._attempts[attempt.id] = attempt
        self._by_sequence[attempt.sequence.sequence_id] = attempt
        self._by_router.setdefault(attempt.router, {})[attempt.id] = attempt
        heapq.heappush(self._deadlines, (attempt.deadline_at_s, attempt.sequence.sequence_id))
        if attempt.lease_token is not None:
            self._by_lease[attempt.lease_token] = attempt

    def set_lease(self, attempt: NodeAttempt, lease_token: int) -> None:
        """Record the landing or transfer that the attempt now has."""
        attempt.lease_token = lease_token
        self._by_lease[lease_token] = attempt

    def clear_lease(self, attempt: NodeAttempt) -> None:
        """Forget the attempt's landing or transfer, which is over."""
        if attempt.lease_token is not None:
            del self._by_lease[attempt.lease_token]
            attempt.lease_token = None

    def remove(self, attempt: NodeAttempt) -> None:
        """Remove an attempt; its id is remembered as closed."""
        self.clear_lease(attempt)
        del self._attempts[attempt.id]
        del self._by_sequence[attempt.sequence.sequence_id]
        of_router = self._by_router[attempt.router]
        del of_router[attempt.id]
        if not of_router:
            del self._by_router[attempt.router]
        self.close(attempt.id)
        if self._ended is not None:
            self._ended.append(attempt)
        if len(self._deadlines) > 2 * len(self._attempts) + MAX_DEAD_DEADLINES:
            self._deadlines = [one for one in self._deadlines if one[1] in self._by_sequence]
            heapq.heapify(self._deadlines)

    def close(self, attempt_id: AttemptId) -> None:
        """Remember that this attempt is over, or was aborted before its request came."""
        self._closed[attempt_id] = None
        self._closed.move_to_end(attempt_id)
        if len(self._closed) > MAX_CLOSED_ATTEMPTS:
            self._closed.popitem(last=False)

    def reopen(self, attempt_id: AttemptId) -> None:
        """Forget that this attempt is over: the call for it was refused, and may come again."""
        self._closed.pop(attempt_id, None)

    def is_closed(self, attempt_id: AttemptId) -> bool:
        """Return whether the attempt is over, as far as the bounded memory goes."""
        return attempt_id in self._closed

    def keep_ended(self) -> None:
        """Keep removed attempts for `take_ended`, which is called from now on."""
        self._ended = deque(maxlen=MAX_CLOSED_ATTEMPTS)

    def take_ended(self) -> list[NodeAttempt]:
        """Return the attempts removed since the last call, oldest first.

        Of more than `MAX_CLOSED_ATTEMPTS` the latest.
        """
        if not self._ended:
            return []
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def get(self, attempt_id: AttemptId) -> NodeAttempt | None:
        """Return the attempt, or None if it is not in the table."""
        return self._attempts.get(attempt_id)

    def of_sequence(self, sequence: Sequence) -> NodeAttempt | None:
        """Return the attempt that a sequence belongs to."""
        return self._by_sequence.get(sequence.sequence_id)

    def of_lease(self, lease_token: int) -> NodeAttempt | None:
        """Return the attempt whose landing or transfer this is."""
        return self._by_lease.get(lease_token)

    def of_router(self, router: Incarnation) -> list[NodeAttempt]:
        """Return all attempts of a router."""
        return list(self._by_router.get(router, {}).values())

    def all(self) -> list[NodeAttempt]:
        """Return all attempts."""
        return list(self._attempts.values())

    def expired(self, now_s: float) -> list[NodeAttempt]:
        """Return the attempts whose deadline has passed; each is returned once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            attempt = self._by_sequence.get(heapq.heappop(self._deadlines)[1])
            if attempt is not None:
                expired.append(attempt)
        return expired

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline in the table; None: it is empty."""
        while self._deadlines and self._deadlines[0][1] not in self._by_sequence:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None


def emit_tokens(attempt: NodeAttempt, output: StepOutput) -> SendOutput:
    """Return the tokens that a step drew, and note in the attempt whether they end it."""
    details = NO_DETAILS
    if not output.first_index or output.finish_reason is not None or output.logprobs:
        queue_s, compute_s = (0.0, 0.0) if output.first_index else attempt.prompt_spans_s()
        details = OutputDetails(
            logprobs=output.logprobs,
            queue_s=queue_s,
            compute_s=compute_s,
            finish_reason=output.finish_reason,
            prompt_logprobs=output.prompt_logprobs,
        )
    if output.finish_reason is not None:
        attempt.outcome = output.finish_reason.value
    return SendOutput(
        attempt.router,
        RequestOutput(
            attempt.id, output.first_index, output.token_ids, False, new_counts(attempt), details
        ),
    )


def new_counts(attempt: NodeAttempt) -> RequestCounts | None:
    """Return what is counted for an attempt, and note that it was sent; None where it was."""
    sequence = attempt.sequence
    counts = RequestCounts(
        sequence.num_cached_tokens, sequence.num_drafted, sequence.num_accepted_drafts
    )
    if counts == attempt.sent_counts:
        return None
    attempt.sent_counts = counts
    return counts


def emit_error(attempt: NodeAttempt, error: PdserveError) -> SendOutput:
    """Return the end of an attempt that failed."""
    return SendOutput(
        attempt.router,
        RequestOutput(
            id=attempt.id,
            details=OutputDetails(
                finish_reason=FinishReason.ERROR, error_code=error.code, error_message=str(error)
            ),
        ),
    )


def refused(scheduler: Scheduler, message: Submit, error: PdserveError) -> AnswerCall:
    """Return the refusal of a request, with the room that the node has."""
    pool = scheduler.pool
    refusal = CallRefused(error, pool.num_available, max(scheduler.num_free_seats, 0))
    return AnswerCall(message.reply_to, refusal)
