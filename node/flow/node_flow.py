"""What a node decides: about requests, aborts, lost routers, deadlines and failures.

Pure: events and the time come in, effects go out. What is done with a request follows from what its
router asked for, whatever role the node has: a prompt that is sent on (`prefill`), or a reservation
(`decode`).
"""

from __future__ import annotations

from itertools import count

from common.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PdserveError,
)
from common.nodes import NodeLoad
from common.request import FinishReason
from engine.core.runner_contract import RunnerResult
from engine.core.scheduler import Scheduler
from engine.core.sequences.status import SequenceStatus
from engine.core.step.step_in_flight import PlannedStep, Pushes
from engine.core.step.step_results import StepOutputs
from kv_transfer.contract import ConnectorFailed, TransferEnded
from kv_transfer.shared.deadlines import earliest_s
from node.flow.attempts.attempt_queue import AttemptQueue
from node.flow.attempts.attempt_table import (
    RETRY_AFTER_S,
    AttemptTable,
    NodeAttempt,
    emit_error,
    refused,
)
from node.flow.attempts.shedding import Shedding
from node.flow.attempts.standstills import Standstills
from node.flow.copies_under_way import CopiesUnderWay
from node.flow.current_load import current_load
from node.flow.decode import Reservations
from node.flow.flow_limits import FlowLimits, why_starved
from node.flow.landing_place import Tickets
from node.flow.messages import (
    AbortAttempt,
    AnswerCall,
    CallRefused,
    CheckCopies,
    Compiled,
    CopyEnded,
    DiskEnded,
    Drain,
    Drained,
    Effect,
    FetchBlocks,
    Message,
    NodeSnapshot,
    NodeStatistics,
    PullRefused,
    RoleChanged,
    RouterGone,
    SendBlocks,
    Submit,
    WarmNode,
)
from node.flow.prefill import SentPrompts
from node.flow.pulls.hand_over import HandOver
from node.flow.pulls.prefix_pulls import PrefixPulls
from node.flow.pulls.prefix_sends import PrefixSends
from node.flow.pulls.pull_cost import PullCost
from node.flow.shared_parts import SharedParts


class NodeFlow:
    """The decisions of one engine node."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: FlowLimits,
        *,
        tickets: Tickets,
        needs_staging: bool,
        local_prefill_threshold: int,
        pull_cost: PullCost,
        disk_cost: PullCost | None = None,
        hand_over: HandOver | None = None,
    ) -> None:
        """Make it; with `hand_over` a drained node stays until others have what it offers."""
        self.scheduler = scheduler
        self.attempts = AttemptTable()
        self._sequence_ids = count(1)
        self._limits = limits
        self._standstills = Standstills()
        self._shedding = Shedding(self._standstills)
        self.is_draining = False
        self._hand_over_at_s: float | None = None
        self._has_said_drained = False
        self._unreported: StepOutputs | None = None
        self._copies = CopiesUnderWay()
        self._queue = AttemptQueue(scheduler, disk_cost)
        self._disk = self._queue.disk
        self._hand_over_of_cache = hand_over
        copies = self._copies if needs_staging else None
        self.sends = PrefixSends(scheduler, tickets.place.fingerprint, copies, self._disk)
        self.pulls = PrefixPulls(
            scheduler, tickets, pull_cost, copies=copies, resume=self._queue.add_if_ready
        )
        shared = SharedParts(
            scheduler, self.attempts, self._queue, self._copies, self.pulls, limits, self._fail
        )
        self.reservations = Reservations(
            shared,
            local_prefill_threshold=local_prefill_threshold,
            tickets=tickets,
            needs_staging=needs_staging,
        )
        self.prompts = SentPrompts(shared, needs_staging=needs_staging, place=tickets.place)

    # --- events -------------------------------------------------------------------------------

    def on_message(self, message: Message, now_s: float) -> list[Effect]:
        """Handle one message. Raises `InternalError` after a bug in the KV connector."""
        return self.report() + self._on_message(message, now_s)

    def _on_message(self, message: Message, now_s: float) -> list[Effect]:
        match message:
            case Submit():
                return self._on_submit(message, now_s)
            case Compiled():
                return self._on_compiled(message)
            case AbortAttempt():
                return self._on_abort(message)
            case RouterGone(router):
                return [e for one in self.attempts.of_router(router) for e in self._drop(one)]
            case Drain(timeout_s):
                return self._on_drain(timeout_s, now_s)
            case SendBlocks(_, ticket):
                self._on_asked(now_s)
                is_used = self.attempts.of_lease(ticket.lease_token) is not None
                return [] if is_used else self.sends.begin(message, now_s)
            case TransferEnded(lease_token) if lease_token in self.sends:
                self._on_asked(now_s)
                return self.sends.on_ended(message, now_s)
            case PullRefused(lease_token):
                return self.pulls.on_refused(lease_token, now_s)
            case WarmNode():
                return [] if self.is_draining else self.sends.offer(message)
            case FetchBlocks():
                return [] if self.is_draining else self.pulls.fetch(message, now_s)
            case RoleChanged():
                self._shedding = Shedding(self._standstills)
                return []
            case CopyEnded():
                return self._copies.end(message)
            case DiskEnded():
                return self._disk.on_ended(message, now_s)
            case ConnectorFailed(error):
                # Stop at once: blocks that are released after this could still be written.
                raise InternalError("the KV connector met a bug") from error
            case _ if message.lease_token in self.pulls:
                return self.pulls.on_event(message, now_s)
            case TransferEnded():
                return self.prompts.on_transfer_ended(message)
            case _:
                return self.reservations.on_kv_event(message, now_s)

    def on_time(self, now_s: float) -> list[Effect]:
        """Fail attempts past their deadline; while draining, report when nothing is left."""
        due_s, effects = self._next_due_s(), list[Effect]()
        if due_s is not None and due_s <= now_s:
            effects += self.report()
            for attempt in self.attempts.expired(now_s):
                if not attempt.is_over:
                    error = DeadlineExceeded("the request's deadline passed on the node")
                    effects += self._fail(attempt, error)
        effects += self._disk.on_time(now_s)
        if self._hand_over_at_s is not None and now_s >= self._hand_over_at_s:
            self._hand_over_at_s = None
            effects += self._hand_over()
        if self.is_draining and self.is_empty and not self._has_said_drained:
            effects += self._leave(now_s)
        if self._copies:
            self._copies.on_check(now_s)
            effects.append(CheckCopies())
        return effects

    def next_deadline_s(self) -> float | None:
        """Return when `on_time` must be called next; None: nothing is due."""
        return earliest_s(self._next_due_s(), self._copies.next_check_s(), self._disk.next_due_s())

    def _next_due_s(self) -> float | None:
        if not self.is_draining:
            return self.attempts.next_deadline_s()
        leaving = self._hand_over_of_cache
        ends_at_s = None if leaving is None or self._has_said_drained else leaving.ends_at_s
        if ends_at_s is not None and not self.is_empty:
            ends_at_s = None  # it leaves when something ends, and waits for no time
        return earliest_s(self.attempts.next_deadline_s(), self._hand_over_at_s, ends_at_s)

    @property
    def is_empty(self) -> bool:
        """Whether there is no attempt, no block in quarantine, no copy and no prefix on its way."""
        held = self.scheduler.quarantined or self.scheduler.prefix_transfers
        return not (len(self.attempts) or held or self._copies or self.sends)

    def begin_step(self, now_s: float) -> tuple[PlannedStep, list[Effect]]:
        """Plan a step; answer reservations that got blocks, fail sequences that can never run."""
        pulled = self.pulls.begin_waiting(now_s) if self.pulls.wait_for_room else []
        scheduler, step = self.scheduler, self.scheduler.plan()
        are_taken = scheduler.num_free_seats <= 0
        self._shedding.on_step(now_s, scheduler.waiting, runs=bool(step.batch), are_taken=are_taken)
        effects = self.report() if step.starved else []
        # Before any other effect: what the copies read was written by the steps before this one.
        if step.swap_copies:
            end = self.scheduler.end_copy
            effects += [self._copies.begin_swap(copy, end) for copy in step.swap_copies]
        effects += pulled
        effects += self._disk.write()
        if step.reserved:
            effects += self.reservations.on_reserved(step, now_s)
        for sequence in step.sequences:
            attempt = self.attempts.of_sequence(sequence)
            if attempt is None:
                continue
            if attempt.computing_since_s is None:
                attempt.computing_since_s = now_s
            if attempt.first_token_at_s is None and attempt.landed_at_s is None:
                attempt.num_chunks += 1
        for sequence in step.starved:
            attempt = self.attempts.of_sequence(sequence)
            assert attempt is not None, "a running sequence belongs to an attempt"
            effects += self._fail(
                attempt, why_starved(sequence.num_known, self.scheduler.pool.num_blocks)
            )
        return step, effects

    def plan_ahead(self, step: PlannedStep) -> None:
        """Decide, while `step` runs, what the next one could run."""
        self.scheduler.plan_ahead(step)

    def end_step(self, step: PlannedStep, results: RunnerResult, now_s: float) -> None:
        """Record a step's results; `report` tells of them."""
        if self._standstills.is_in(step.took_s, self.pulls.cost.compute_s(step.num_tokens)):
            step.took_s = 0.0  # says nothing of how fast the node is
        outputs = self.scheduler.apply(step, results)
        for output in outputs.others.values():
            attempt = self.attempts.of_sequence(output.sequence)
            if attempt is not None and (output.first_index == 0 or output.sequence.is_exported):
                attempt.first_token_at_s = now_s
            if attempt is not None and output.finish_reason is not None:
                self._shedding.on_end(attempt, now_s)
        self._unreported = outputs

    def report(self) -> list[Effect]:
        """Return the effects that report the latest results; none if that was done.

        An event that may end an attempt reports first, so that its tokens come before its end.
        """
        if self._unreported is None:
            return []
        outputs, self._unreported = self._unreported, None
        return self._on_outputs(outputs)

    def fail_step(self, step: PlannedStep, error: Exception, now_s: float) -> list[Effect]:
        """End the sequences of a step that failed with a typed error; all others go on."""
        failure = error if isinstance(error, PdserveError) else InternalError(f"a step: {error!r}")
        effects = self.report()
        for sequence in step.sequences:
            attempt = self.attempts.of_sequence(sequence)
            if attempt is not None and not attempt.is_over:
                effects += self._fail(attempt, failure)
        return effects

    def on_stop(self) -> list[Effect]:
        """Fail every attempt, because the node stops."""
        effects = self.report()
        for attempt in self.attempts.all():
            if not attempt.is_over:
                effects += self._fail(attempt, NodeLost("the node is stopping"))
        return effects

    def pushes(self, step: PlannedStep) -> Pushes[Effect] | None:
        """Return the pushes of blocks for a step; None without prompts that are sent on."""
        return self.prompts.pushes(step)

    def snapshot(self) -> NodeSnapshot:
        """Return the present statistics and load, as values that do not change."""
        seen = self.scheduler.statistics()
        statistics = NodeStatistics(scheduler=seen, num_transfers=self.attempts.num_leases)
        return NodeSnapshot(statistics, self._load(seen.num_queued_tokens))

    def load(self) -> NodeLoad:
        """Return the load as of now, without the statistics."""
        return self._load(self.scheduler.num_queued_tokens)

    # --- inside -------------------------------------------------------------------------------

    def _load(self, num_queued_tokens: int) -> NodeLoad:
        return current_load(
            self.scheduler,
            num_queued_tokens=num_queued_tokens,
            num_held=len(self._queue),
            is_draining=self.is_draining,
        )

    def _on_drain(self, timeout_s: float, now_s: float) -> list[Effect]:
        """Begin to drain: refuse reservations that wait for room, which other nodes can take, and
        fetch no further part of what another node has cached."""
        if self.is_draining:
            return []
        self.is_draining = True
        self.pulls.end_fetching()
        self._hand_over_at_s = now_s + timeout_s
        leaving = Draining("this node is draining")
        return [
            effect
            for attempt in self.attempts.all()
            if attempt.waiting_replies
            for effect in self._fail(attempt, leaving)
        ]

    def _on_asked(self, now_s: float) -> None:
        if self._hand_over_of_cache is not None:
            self._hand_over_of_cache.on_asked(now_s)

    def _leave(self, now_s: float) -> list[Effect]:
        """Report that the node is empty, when its cache was handed over or no node wants it."""
        effects: list[Effect] = []
        leaving = self._hand_over_of_cache
        if leaving is not None:
            effects = leaving.begin(now_s)
            if leaving.ends_at_s is not None and now_s < leaving.ends_at_s:
                return effects
        self._has_said_drained = True
        return [*effects, Drained()]

    def _hand_over(self) -> list[Effect]:
        """Fail running attempts, which their routers continue on other nodes.

        A prompt whose KV is being sent stays: it requires no further step, only acknowledgements.
        """
        late = Draining("this node is draining, and its time to finish is over")
        return [
            effect
            for attempt in self.attempts.all()
            if not attempt.is_over and attempt.sequence.status is not SequenceStatus.EXPORTING
            for effect in self._fail(attempt, late)
        ]

    def _on_submit(self, message: Submit, now_s: float) -> list[Effect]:
        attempt_id = message.request.id
        attempt = self.attempts.get(attempt_id)
        if attempt is not None and _is_asked_again(attempt, message):
            if attempt.answer is not None:
                return [AnswerCall(message.reply_to, attempt.answer)]
            attempt.waiting_replies.append(message.reply_to)
            return []
        if attempt is not None or self.attempts.is_closed(attempt_id):
            text = f"attempt {attempt_id} is over, or here for something else"
            return [self._refuse(message, InvalidRequest(text))]
        if self.is_draining:
            return [self._refuse(message, Draining("this node is draining"))]
        problem = self._limits.problem_with(
            message.request, self.scheduler.limits, self.scheduler.pool.num_blocks
        )
        if problem is not None:
            return [self._refuse(message, problem)]
        num_waiting = len(self.scheduler.waiting) + len(self._queue)
        if num_waiting >= self._limits.max_queued_requests:
            text = f"{num_waiting} requests wait on this node"
            return [self._refuse(message, Overloaded(text, retry_after_s=RETRY_AFTER_S))]
        late = self._shedding.refusal(
            message.request, self.scheduler.waiting, is_prompt=message.is_prompt
        )
        if self._limits.sheds and late is not None:
            return [self._refuse(message, late)]
        if message.ticket is not None and self._is_in_use(message.ticket.lease_token):
            text = f"lease {message.ticket.lease_token:#x} is in use by another attempt"
            return [self._refuse(message, InvalidRequest(text))]
        life = self.prompts if message.is_prompt else self.reservations
        return life.submit(message, next(self._sequence_ids), now_s)

    def _is_in_use(self, lease_token: int) -> bool:
        is_attempts = self.attempts.of_lease(lease_token) is not None
        return is_attempts or lease_token in self.sends or lease_token in self.pulls

    def _on_compiled(self, message: Compiled) -> list[Effect]:
        held = self._queue.waiting_for(message)
        if held is None:
            return []
        attempt = self.attempts.get(message.attempt)
        assert attempt is not None, "an attempt is held until it is over"
        error = message.error or self.reservations.why_not_queued(attempt.sequence, held)
        if error is not None:
            return self._fail(attempt, error)
        self._queue.on_compiled(attempt)
        return []

    def _on_abort(self, message: AbortAttempt) -> list[Effect]:
        effects: list[Effect] = []
        for attempt_id in message.attempts:
            attempt = self.attempts.get(attempt_id)
            if attempt is None:
                self.attempts.close(attempt_id)
            elif attempt.router == message.router:
                effects += self._drop(attempt)
        return effects

    def _drop(self, attempt: NodeAttempt) -> list[Effect]:
        """End an attempt without an output; calls that still wait are refused."""
        if attempt.is_over:
            return []
        attempt.outcome = FinishReason.ABORT.value
        waiting = attempt.take_waiting_replies()
        gone = CallRefused(InvalidRequest(f"attempt {attempt.id} was aborted"))
        return [*(AnswerCall(reply_to, gone) for reply_to in waiting), *self._release(attempt)]

    def _fail(self, attempt: NodeAttempt, error: PdserveError) -> list[Effect]:
        """End an attempt with a typed error, in the reply to a waiting call or in the stream."""
        attempt.outcome = error.code
        waiting = attempt.take_waiting_replies()
        effects: list[Effect] = [AnswerCall(reply_to, CallRefused(error)) for reply_to in waiting]
        if not waiting:
            effects.append(emit_error(attempt, error))
        effects += self._release(attempt)
        if waiting:  # a refused call leaves nothing: its router may ask again, to wait for room
            self.attempts.reopen(attempt.id)
        return effects

    def _release(self, attempt: NodeAttempt) -> list[Effect]:
        return (self.prompts if attempt.is_prompt else self.reservations).release(attempt)

    def _refuse(self, message: Submit, error: PdserveError) -> AnswerCall:
        return refused(self.scheduler, message, error)

    def _on_outputs(self, outputs: StepOutputs) -> list[Effect]:
        effects: list[Effect] = []
        for output in outputs:
            attempt = self.attempts.of_sequence(output.sequence)
            assert attempt is not None, "a running sequence belongs to an attempt"
            life = self.prompts if attempt.is_prompt else self.reservations
            effects += life.on_output(attempt, output)
        return effects


def _is_asked_again(attempt: NodeAttempt, message: Submit) -> bool:
    is_same = (attempt.router, attempt.is_prompt) == (message.router, message.is_prompt)
    return is_same and not attempt.is_over
