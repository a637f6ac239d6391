"""One choice of one request, from the choice of nodes to its one outcome. No I/O, no clock.

    state       event                           next        effects beside the next state's own
    ----------  ------------------------------  ----------  ------------------------------------
    (new)       start                           CHOOSING    Choose
    CHOOSING    choice: decode (and prefill)    RESERVING   SendReserve (local: no prefill named)
                choice: prefill alone           PREFILLING  SendPrefill without ticket
                choice: prefill for a ticket    PREFILLING  SendPrefill with the ticket
                choice: none for a ticket       RESERVING   abort; new attempt, local, same node
                no choice                       DONE        Fail
    RESERVING   reply: ticket                   PREFILLING  SendPrefill, PlaceRecord
                reply: local start              LOCAL       PlaceRecord
                reply: refusal                  CHOOSING    Choose, this node excluded
                all refused for want of room    CHOOSING    Choose, to wait in a node's queue
                its output comes first          RUNNING     as in RUNNING
    PREFILLING  reply: refusal                  CHOOSING    Choose, this node excluded
                token 0                         PREFILLING  TokenChunk
                token 0 ends the answer         DONE        TokenChunk, abort decode, Finish
                decode started                  RUNNING     the prefill leg is over with token 0
    LOCAL       output                          RUNNING     TokenChunk
    RUNNING     output                          RUNNING     TokenChunk
                last token                      DONE        TokenChunk, Finish
    any         a leg fails or its node is      CHOOSING    abort; new attempt, node excluded
                lost or drained                             (see `MAX_ATTEMPTS`)
                a leg breaks the protocol or    DONE        abort, Fail
                its pool, tokens emitted
                deadline, error, client gone    DONE        abort, Fail or Finish(ABORT)

A *leg* is one attempt on one node. It is open from the moment the node is asked until the node is
known to hold nothing: it refused, it finished, or (a prefill node) its KV was taken over. Every
attempt that ends sends `SendAbort` for each open leg, and a grant that arrives for a closed attempt
is answered with one more. A ticket goes to a second prefill node only when the first refused it
explicitly: after a failed call it is unknown whether the first one writes, so that attempt is over.

An attempt that begins after tokens were emitted continues behind them: the decode node gets them
with the prompt, computes both and draws the next one. The client reads the same tokens as without a
failure, because each depends on those before it, the seed and its index alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from common.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    HandoffFailed,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PdserveError,
    PeerProtocolError,
    PoolExhausted,
    StaleEpoch,
    error_from_code,
)
from common.ids import AttemptId, Incarnation
from common.request import FinishReason, GenerationRequest, RequestOutput, SamplingParams
from router.core.effects import (
    Choose,
    Effect,
    Fail,
    Finish,
    LegClosed,
    PlaceRecord,
    SendAbort,
    SendPrefill,
    SendReserve,
    Unplace,
)
from router.core.generation import TokenChunk
from router.core.token_ledger import TokenLedger

MAX_ATTEMPTS = 3
"""Attempts that ended because their node drains do not count: each excludes that node."""
_MIN_DEADLINE_S = 0.001


class State(Enum):
    """Where a request is; see the table above."""

    CHOOSING = "choosing"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    LOCAL = "local"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Reservation:
    """A decode node's grant. `ticket` None: the node computes the prompt itself."""

    ticket: object | None
    num_cached_tokens: int


class RequestFlow:
    """The state machine. Each `on_…` returns the effects to perform, in order."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        deadline_at_s: float,
        priority: int = 0,
    ) -> None:
        self.state = State.CHOOSING
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._sampling = sampling
        self._deadline_at_s = deadline_at_s
        self._priority = priority
        self._ledger = TokenLedger(sampling)
        self._attempt = AttemptId(request_id, 0)
        self._num_handed_over = 0
        self._decode: Incarnation | None = None
        self._prefill: Incarnation | None = None
        self._planned_prefill: Incarnation | None = None
        self._ticket: object | None = None
        self._has_started = False
        self._is_placed = False
        self._reason = ""
        self._excluded: set[Incarnation] = set()
        self._full: set[Incarnation] = set()
        self._may_wait = False
        self._aborted: set[tuple[Incarnation, AttemptId]] = set()
        self._retry_after_s: float | None = None
        self._is_shed = False
        self._last_refusal = ""
        self._failure: PdserveError | None = None
        self._out: list[Effect] = []

    # What the shell may read.

    @property
    def is_done(self) -> bool:
        return self.state is State.DONE

    @property
    def attempt(self) -> AttemptId:
        """The current attempt, or the last one."""
        return self._attempt

    @property
    def failure(self) -> PdserveError | None:
        """What ended the attempt before the current one, if there was one."""
        return self._failure

    @property
    def decode(self) -> Incarnation | None:
        """The decode or mixed node that holds, or was asked to hold, the current attempt."""
        return self._decode

    @property
    def prefill(self) -> Incarnation | None:
        """The prefill node of the current attempt, until its KV was taken over."""
        return self._prefill

    @property
    def has_first_token(self) -> bool:
        """Whether token 0 is known."""
        return self._ledger.has(0)

    # Events.

    def start(self) -> list[Effect]:
        """Begin the first attempt."""
        self._begin_attempt()
        return self._take_effects()

    def on_choice(
        self,
        decode: Incarnation | None,
        prefill: Incarnation | None,
        reason: str,
        now_s: float,
    ) -> list[Effect]:
        """Take the nodes that answer `Choose`."""
        if self.state is not State.CHOOSING:
            return []
        if self._ticket is None:
            self._reason = reason
            if decode is not None:
                self._send_reserve(decode, prefill, now_s)
            elif prefill is not None:
                self._send_prefill(prefill, now_s)
            else:
                self._fail(InternalError("a choice of nodes named none"))
        elif prefill is not None:
            self._send_prefill(prefill, now_s)
        else:
            self._fall_back_to_local(now_s)
        return self._take_effects()

    def on_no_choice(self, error: PdserveError) -> list[Effect]:
        """Take the answer that no node is left for `Choose`."""
        if self.state is not State.CHOOSING:
            return []
        if isinstance(error, Overloaded) and self._full:
            # Every node was asked once and is full: now one of them may queue the request.
            self._may_wait = True
            self._excluded -= self._full
            self._full.clear()
            self._out.append(Choose(None, frozenset(self._excluded)))
            return self._take_effects()
        if isinstance(error, Overloaded):
            error = self._why_given_up() or self._overloaded(str(error), error.retry_after_s)
        self._fail(error)
        return self._take_effects()

    def on_reserve_reply(
        self, node: Incarnation, attempt: AttemptId, reply: Reservation | PdserveError, now_s: float
    ) -> list[Effect]:
        """Take a decode node's grant or refusal."""
        if not self._is_current(attempt) or node != self._decode:
            return self._answer_late_grant(node, attempt, isinstance(reply, Reservation))
        if self.state is not State.RESERVING:
            # The outputs of the node overtook its reply: the choice runs already.
            self._place()
        elif isinstance(reply, PdserveError):
            self._on_refusal(node, reply)
        elif reply.ticket is None:
            self._ledger.note_cached(reply.num_cached_tokens)
            self._planned_prefill = None
            self.state = State.LOCAL
            self._place()
        elif self._planned_prefill is None:
            wrong = PeerProtocolError(f"{node} answered a local prefill with a ticket")
            self._attempt_failed(wrong, node)
        else:
            self._ledger.note_cached(reply.num_cached_tokens)
            self._ticket = reply.ticket
            if self._planned_prefill in self._excluded:
                self._choose_prefill()
            else:
                self._send_prefill(self._planned_prefill, now_s)
        return self._take_effects()

    def on_prefill_reply(
        self, node: Incarnation, attempt: AttemptId, refusal: PdserveError | None
    ) -> list[Effect]:
        """Take a prefill node's acceptance (None) or refusal."""
        if not self._is_current(attempt) or node != self._prefill:
            return self._answer_late_grant(node, attempt, refusal is None)
        if refusal is not None and self.state is State.PREFILLING:
            self._on_refusal(node, refusal)
        return self._take_effects()

    def on_call_failed(
        self, node: Incarnation, attempt: AttemptId, error: PdserveError
    ) -> list[Effect]:
        """Take a call without a reply: its effect on the node is unknown but for the error."""
        is_asked = (self.state is State.RESERVING and node == self._decode) or (
            self.state is State.PREFILLING and node == self._prefill and not self._ledger.has(0)
        )
        if not self._is_current(attempt) or not is_asked:
            return []
        if isinstance(error, (InvalidRequest, Overloaded, StaleEpoch)):
            self._on_refusal(node, error)
        elif isinstance(error, DeadlineExceeded):
            self._fail(error)
        else:
            self._attempt_failed(error, node)
        return self._take_effects()

    def on_output(self, node: Incarnation, output: RequestOutput) -> list[Effect]:
        """Take what a node reports: tokens, its start, its end or its failure."""
        is_prefill = node == self._prefill
        if not self._is_current(output.id) or not (is_prefill or node == self._decode):
            return []
        reason = output.finish_reason
        if reason is FinishReason.ERROR:
            self._on_error_output(node, output)
        elif reason is FinishReason.ABORT:
            self._close_leg(node)
            self._attempt_failed(NodeLost(f"{node} aborted {output.id}"), node)
        else:
            try:
                chunk = self._push(node, output, is_prefill)
            except PeerProtocolError as wrong:
                self._attempt_failed(wrong, node)
                return self._take_effects()
            if reason is None and self.state is State.RUNNING and self._prefill is None:
                return [] if chunk is None else [chunk]  # tokens alone: no leg changes
            self._on_tokens(node, chunk, is_prefill=is_prefill, is_last=reason is not None)
        return self._take_effects()

    def on_node_lost(self, node: Incarnation) -> list[Effect]:
        """Take the loss of a node: its stream broke or fell silent."""
        if not self.is_done and node in (self._decode, self._prefill):
            self._attempt_failed(NodeLost(f"{node} was lost"), node)
        return self._take_effects()

    def on_client_gone(self) -> list[Effect]:
        """End the request: its client has left."""
        if not self.is_done:
            self._end_attempt()
            self.state = State.DONE
            self._out.append(Finish(FinishReason.ABORT))
        return self._take_effects()

    def on_failure(self, error: PdserveError) -> list[Effect]:
        """End the request with `error`: the router stops, or met a bug."""
        if not self.is_done:
            self._fail(error)
        return self._take_effects()

    def on_time(self, now_s: float) -> list[Effect]:
        """Check the deadline."""
        if not self.is_done and now_s >= self._deadline_at_s:
            self._fail(DeadlineExceeded(f"the deadline of {self._request_id} passed"))
        return self._take_effects()

    # Tokens.

    def _push(
        self, node: Incarnation, output: RequestOutput, is_prefill: bool
    ) -> TokenChunk | None:
        """Put the output into the ledger. Raises `PeerProtocolError` for what no node may send."""
        if is_prefill and output.first_index + len(output.token_ids) > 1:
            raise PeerProtocolError(f"{node} sent more than token 0 of {output.id}")
        if self._ticket is not None:
            # A decode node fed by a prefill node owes token 1 on.
            return self._ledger.push(output, 0 if is_prefill else 1)
        if is_prefill and output.token_ids and not output.finish_reason:
            raise PeerProtocolError(f"{node} did not end {output.id}, which is not handed off")
        return self._ledger.push(output, 0)

    def _on_tokens(
        self, node: Incarnation, chunk: TokenChunk | None, *, is_prefill: bool, is_last: bool
    ) -> None:
        """Close the legs that are over with an output, and emit what it completed."""
        if is_last:
            self._close_leg(node)
        if not is_prefill:
            self._has_started = True
            self.state = State.RUNNING
        if self._prefill is not None and self._has_started and self._ledger.has(0):
            self._close_leg(self._prefill)
        if chunk is None:
            return
        self._out.append(chunk)
        if chunk.finish_reason is not None:
            self._end_attempt()
            self.state = State.DONE
            self._out.append(Finish(chunk.finish_reason))

    def _on_error_output(self, node: Incarnation, output: RequestOutput) -> None:
        # In a handoff either side may report the failure. Without this prefill node the next
        # attempt gets another pair, or the same decode node alone.
        suspect = node if self._prefill is None else self._prefill
        self._close_leg(node)
        error = error_from_code(output.error_code, output.error_message)
        if isinstance(error, (Draining, PoolExhausted)):
            self._attempt_failed(error, node)
        elif isinstance(error, (NodeLost, HandoffFailed, StaleEpoch)):
            self._attempt_failed(error, suspect)
        else:
            self._fail(error)

    # Asking nodes.

    def _send_reserve(
        self, decode: Incarnation, planned_prefill: Incarnation | None, now_s: float
    ) -> None:
        self.state = State.RESERVING
        if self._ledger.num_emitted:
            planned_prefill = None  # The node that continues an answer computes all before it.
        self._decode, self._planned_prefill = decode, planned_prefill
        is_local = planned_prefill is None
        self._out.append(SendReserve(decode, self._request(now_s), is_local, self._may_wait))

    def _send_prefill(self, prefill: Incarnation, now_s: float) -> None:
        self.state = State.PREFILLING
        self._prefill = prefill
        self._out.append(SendPrefill(prefill, self._request(now_s), self._ticket))
        self._place()

    def _choose_prefill(self) -> None:
        self.state = State.CHOOSING
        self._out.append(Choose(self._decode, frozenset(self._excluded)))

    def _fall_back_to_local(self, now_s: float) -> None:
        decode = self._decode
        if decode is None or not self._may_try_again():
            self._fail(self._overloaded("every prefill node refused", 1.0))
            return
        self._end_attempt()
        self._reset_attempt()
        self._reason = "local prefill: no prefill node took it"
        self._send_reserve(decode, None, now_s)

    def _on_refusal(self, node: Incarnation, error: PdserveError) -> None:
        # A queue does not help a request for which a queue is too long.
        is_shed = isinstance(error, DeadlineUnreachable)
        self._is_shed |= is_shed
        is_full = isinstance(error, Overloaded) and not is_shed
        if node == self._decode and is_full and not self._may_wait:
            self._full.add(node)
        self._close_leg(node)
        self._excluded.add(node)
        if isinstance(error, (InvalidRequest, DeadlineExceeded)):
            self._fail(error)
            return
        if self._ledger.num_emitted > self._ledger.num_before:
            self._fail(PeerProtocolError(f"{node} refused what it had answered: {error}"))
            return
        self._last_refusal = f"{node} said last: {error}"
        if isinstance(error, Overloaded):
            self._retry_after_s = min(error.retry_after_s, self._retry_after_s or math.inf)
        self._choose_prefill()

    def _request(self, now_s: float) -> GenerationRequest:
        return GenerationRequest(
            id=self.attempt,
            prompt_token_ids=self._prompt_token_ids,
            sampling=self._sampling,
            deadline_s=max(_MIN_DEADLINE_S, self._deadline_at_s - now_s),
            priority=self._priority,
            output_token_ids=tuple(self._ledger.emitted),
        )

    def _place(self) -> None:
        self._is_placed = True
        self._out.append(PlaceRecord(self.attempt, self._decode, self._prefill, self._reason))

    # Beginnings and endings.

    def _begin_attempt(self) -> None:
        self._reset_attempt()
        self.state = State.CHOOSING
        self._out.append(Choose(None, frozenset(self._excluded)))

    def _reset_attempt(self) -> None:
        self._attempt = AttemptId(self._request_id, self._attempt.attempt + 1)
        self._ledger.restart()
        self._ticket = None
        self._planned_prefill = None
        self._has_started = False

    def _attempt_failed(self, error: PdserveError, suspect: Incarnation) -> None:
        self._excluded.add(suspect)
        self._num_handed_over += isinstance(error, Draining)
        if not self._may_try_again() or (self._ledger.num_emitted and not _can_continue(error)):
            self._fail(error)
            return
        self._failure = error
        self._end_attempt()
        self._begin_attempt()

    def _may_try_again(self) -> bool:
        return self._attempt.attempt - self._num_handed_over < MAX_ATTEMPTS

    def _why_given_up(self) -> PdserveError | None:
        """Return what ended the last attempt, now that no node is left for another one."""
        if isinstance(self._failure, Draining):
            return NodeLost(f"{self._failure}, and no other node can go on")
        return self._failure

    def _fail(self, error: PdserveError) -> None:
        self._end_attempt()
        self.state = State.DONE
        self._out.append(Fail(error))

    def _end_attempt(self) -> None:
        for node in (self._decode, self._prefill):
            if node is not None:
                self._aborted.add((node, self.attempt))
                self._out.append(SendAbort(node, self.attempt))
                self._close_leg(node)
        if self._is_placed:
            self._is_placed = False
            self._out.append(Unplace(self.attempt))

    def _close_leg(self, node: Incarnation) -> None:
        if node == self._decode:
            self._decode = None
        else:
            self._prefill = None
        self._out.append(LegClosed(node))

    def _overloaded(self, message: str, retry_after_s: float) -> Overloaded:
        if self._retry_after_s is not None:
            retry_after_s = self._retry_after_s
        if self._last_refusal:
            message = f"{message}; {self._last_refusal}"
        kind = DeadlineUnreachable if self._is_shed else Overloaded
        return kind(message, retry_after_s=retry_after_s)

    def _answer_late_grant(
        self, node: Incarnation, attempt: AttemptId, is_grant: bool
    ) -> list[Effect]:
        # The abort may have overtaken what it was to end.
        was_aborted = (node, attempt) in self._aborted
        return [SendAbort(node, attempt)] if is_grant and was_aborted else []

    def _is_current(self, attempt: AttemptId) -> bool:
        return self.state is not State.DONE and attempt == self._attempt

    def _take_effects(self) -> list[Effect]:
        effects, self._out = self._out, []
        return effects


def _can_continue(error: PdserveError) -> bool:
    """Return whether another node may continue behind what was emitted before this error."""
    is_lost = isinstance(error, (NodeLost, HandoffFailed, StaleEpoch))
    return is_lost and not isinstance(error, PeerProtocolError)
