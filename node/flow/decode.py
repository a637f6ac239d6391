"""The life of a reservation, to the last token. Pure.

Reserve ──► refused
   ├──────► StartedLocally ──► (pulled) ───────► tokens 0, 1, … ──► finished
   └──────► (waits) ──► Reserved ──► landed ──► staged ──► tokens 1, 2, … ──► finished
                            └──────────┴──► failed, expired, aborted: the seat is free at once; the
                                            blocks are quarantined until nobody can write them

A failure is reported to the router, unless the prefill node has given the transfer up: that node
reports why.

What another node has cached of a prompt that is computed here can be pulled from there while the
prompt waits; see `prefix_pulls`.

KV is staged when steps read other memory than the one it landed in (on a GPU); elsewhere a sequence
starts as soon as it has landed.
"""

from __future__ import annotations

from functools import partial

from common.errors import HandoffFailed, InternalError, Overloaded
from common.kv.blocks import blocks_for
from common.request import FinishReason, OutputDetails, RequestOutput
from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_in_flight import PlannedStep
from engine.core.step.step_results import StepOutput
from kv_transfer.contract import (
    Commit,
    GivenUp,
    KVEvent,
    Landed,
    LandingFailed,
    Released,
    Ticket,
)
from node.flow.attempts.attempt_table import (
    RETRY_AFTER_S,
    NodeAttempt,
    emit_tokens,
    new_counts,
    refused,
)
from node.flow.landing_place import Tickets
from node.flow.messages import (
    AnswerCall,
    CloseLanding,
    Effect,
    OpenLanding,
    Reserved,
    SendOutput,
    StartedLocally,
    Submit,
)
from node.flow.shared_parts import SharedParts


class Reservations:
    """The reservations of a node, and what is computed in place of some.

    With `needs_staging`, landed KV is copied before a step may read it.

    A prompt, with the answer so far, of at most `local_prefill_threshold` uncached tokens is
    computed here, without a prefill node. A router asks for that as well, where it has none.
    """

    def __init__(
        self,
        shared: SharedParts,
        *,
        local_prefill_threshold: int,
        tickets: Tickets,
        needs_staging: bool,
    ) -> None:
        self._scheduler = shared.scheduler
        self._attempts = shared.attempts
        self._queue = shared.queue
        self._copies = shared.copies
        self._pulls = shared.pulls
        self._limits = shared.limits
        self._fail = shared.fail
        self._local_prefill_threshold = local_prefill_threshold
        self._new_tickets = tickets
        self._needs_staging = needs_staging
        self._staging: set[int] = set()
        """Lease tokens of landings whose KV is being copied."""
        self._quarantined: dict[int, Sequence] = {}
        """Sequences by lease token whose landing is revoked, but may still be written."""

    def __len__(self) -> int:
        """Return how many landings are revoked that may still be written."""
        return len(self._quarantined)

    def submit(self, message: Submit, sequence_id: int, now_s: float) -> list[Effect]:
        """Take a new, valid request."""
        request = message.request
        sequence = Sequence(sequence_id, request)
        num_cached = self._scheduler.num_cached_tokens(sequence)
        attempt = NodeAttempt(
            request.id,
            message.router,
            sequence,
            now_s + request.deadline_s,
            message.received_at_s,
        )
        if (
            message.must_prefill_locally
            or self._ends_with_first_token(sequence)
            or self._prefills_locally(sequence.num_known - num_cached)
        ):
            attempt.answer = StartedLocally(num_cached)
            self._attempts.add(attempt)
            effects: list[Effect] = [AnswerCall(message.reply_to, attempt.answer)]
            effects += self._queue.disk.begin(attempt, now_s)
            if message.source is not None:
                effects += self._pulls.begin(attempt, message.source, now_s)
            self._queue.put(attempt, message)
            return effects
        sequence.has_remote_kv = True
        full = self.why_not_queued(sequence, message)
        if full is not None:
            return [refused(self._scheduler, message, full)]
        attempt.waiting_replies.append(message.reply_to)
        self._attempts.add(attempt)
        self._queue.put(attempt, message)
        return []

    def why_not_queued(self, sequence: Sequence, message: Submit) -> Overloaded | None:
        """Return why a reservation is refused that may not wait: there is no room for it."""
        if not sequence.has_remote_kv or message.may_wait or self._scheduler.can_seat(sequence):
            return None
        return self._why_full()

    def _prefills_locally(self, num_uncached: int) -> bool:
        return num_uncached <= self._local_prefill_threshold

    def on_reserved(self, step: PlannedStep, now_s: float) -> list[Effect]:
        """Answer the reservations that a step has given their blocks."""
        effects: list[Effect] = []
        for sequence in step.reserved:
            attempt = self._attempts.of_sequence(sequence)
            assert attempt is not None, "a reserved sequence belongs to an attempt"
            ticket = self._ticket(attempt, now_s)
            attempt.answer = Reserved(ticket)
            self._attempts.set_lease(attempt, ticket.lease_token)
            effects.append(OpenLanding(ticket))
            waiting = attempt.take_waiting_replies()
            effects += [AnswerCall(reply_to, attempt.answer) for reply_to in waiting]
        return effects

    def on_kv_event(self, event: KVEvent, now_s: float) -> list[Effect]:
        """Handle the end of a landing, or the release of its blocks."""
        attempt = self._attempts.of_lease(event.lease_token)
        match event:
            case Landed() if attempt is not None:
                attempt.landed_at_s = now_s
                return self._on_landed(attempt, event)
            case LandingFailed(_, GivenUp()) if attempt is not None:
                # The prefill node ended the attempt, and tells its router why: by the first token,
                # by an error, or it was asked to. A second word here could be heard before that.
                attempt.outcome = FinishReason.ABORT.value
                return self.release(attempt)
            case LandingFailed(_, error) if attempt is not None:
                return self._fail(attempt, error)
            case Landed(lease_token) | Released(lease_token):
                # `Landed` too: the landing was complete before it was revoked.
                effects: list[Effect] = []
                if attempt is not None:
                    effects = self._fail(attempt, HandoffFailed("the landing ended without KV"))
                self._end_quarantine(lease_token)
                return effects
        return []

    def _end_quarantine(self, lease_token: int) -> None:
        """Free the blocks of this landing, which nobody can write any more."""
        sequence = self._quarantined.pop(lease_token, None)
        if sequence is not None:
            self._scheduler.end_quarantine(sequence)

    def _on_landed(self, attempt: NodeAttempt, event: Landed) -> list[Effect]:
        sequence, commit = attempt.sequence, event.commit
        problem = self._problem_with_commit(sequence, commit)
        if problem:
            effects = self._fail(attempt, HandoffFailed(problem))
            self._end_quarantine(event.lease_token)
            return effects
        if self._needs_staging:
            self._staging.add(event.lease_token)
            copy = CacheCopy(CopyKind.STAGE_IN, self._target_blocks(sequence))
            return [self._copies.begin(copy, partial(self._on_staged, event.lease_token, commit))]
        return self._start(attempt, commit)

    def _on_staged(self, lease_token: int, commit: Commit, error: Exception | None) -> list[Effect]:
        attempt = self._attempts.of_lease(lease_token)
        effects: list[Effect] = []
        if attempt is not None and error is not None:
            effects = self._fail(attempt, InternalError(f"landed KV was not copied in: {error!r}"))
        elif attempt is not None:
            effects = self._start(attempt, commit)
        self._staging.remove(lease_token)
        self._end_quarantine(lease_token)
        return effects

    def _start(self, attempt: NodeAttempt, commit: Commit) -> list[Effect]:
        """Start decoding a sequence whose KV is in the cache that steps read."""
        sequence = attempt.sequence
        self._attempts.clear_lease(attempt)
        # The prefill node may be configured to draft more tokens than this one verifies.
        drafts = commit.draft_token_ids[: self._scheduler.limits.num_speculative_tokens]
        first = self._scheduler.land(sequence, commit.first_token_id, draft_token_ids=drafts)
        if first.finish_reason is not None:
            attempt.outcome = first.finish_reason.value
            self._attempts.remove(attempt)
        started = RequestOutput(
            id=attempt.id,
            first_index=sequence.num_output,
            is_started=True,
            counts=new_counts(attempt),
            details=OutputDetails(finish_reason=first.finish_reason),
        )
        return [SendOutput(attempt.router, started)]

    def _problem_with_commit(self, sequence: Sequence, commit: Commit) -> str:
        if commit.num_tokens != sequence.num_known:
            return (
                f"the commit is for {commit.num_tokens} tokens, "
                f"the reservation for {sequence.num_known}"
            )
        vocab_size = self._limits.vocab_size
        if not 0 <= commit.first_token_id < vocab_size:
            return (
                f"the commit's first token is {commit.first_token_id}: "
                f"the vocabulary has {vocab_size}"
            )
        if not all(0 <= token_id < vocab_size for token_id in commit.draft_token_ids):
            return (
                f"the commit's drafts are {list(commit.draft_token_ids)}: "
                f"the vocabulary has {vocab_size}"
            )
        return ""

    def _ends_with_first_token(self, sequence: Sequence) -> bool:
        """Return whether nothing would be left to decode after the KV has landed."""
        num_left = sequence.request.sampling.max_tokens - sequence.num_output
        return num_left == 1 or sequence.num_known + 1 >= self._limits.max_model_len

    def on_output(self, attempt: NodeAttempt, output: StepOutput) -> list[Effect]:
        """Report the tokens that a step drew."""
        if output.finish_reason is not None:
            self._attempts.remove(attempt)
        return [emit_tokens(attempt, output)]

    def release(self, attempt: NodeAttempt) -> list[Effect]:
        """Release an attempt that is not over: its sequence, blocks, landing."""
        lease_token = attempt.lease_token
        self._queue.finish(attempt)
        self._attempts.remove(attempt)
        if lease_token is None:
            return self._pulls.leave(attempt)
        self._quarantined[lease_token] = attempt.sequence
        if lease_token in self._staging:
            return []  # the landing is closed, and the blocks are free when their copy has ended
        return [CloseLanding(lease_token)]

    def _ticket(self, attempt: NodeAttempt, now_s: float) -> Ticket:
        sequence = attempt.sequence
        return self._new_tickets.new(
            attempt.id,
            self._target_blocks(sequence),
            sequence.num_cached_tokens,
            attempt.deadline_at_s - now_s,
        )

    def _target_blocks(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the blocks of the known tokens that were not cached here."""
        size = self._scheduler.limits.block_size
        first = sequence.num_cached_tokens // size
        return tuple(sequence.block_table[first : blocks_for(sequence.num_known, size)])

    def _why_full(self) -> Overloaded:
        scheduler = self._scheduler
        return Overloaded(
            f"no room: {max(scheduler.num_free_seats, 0)} seats and "
            f"{scheduler.pool.num_available} blocks are free, {len(scheduler.waiting)} wait",
            retry_after_s=RETRY_AFTER_S,
        )
