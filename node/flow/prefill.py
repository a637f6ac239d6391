"""The life of a prompt that is sent on, to the last acknowledged block. Pure.

A request that continues an answer carries the tokens that it has. They are computed after the
prompt, and the next token is drawn in place of token 0.

    Prefill ──► refused
       └──────► accepted ──► chunks, pushed as they are computed ──► token 0 ──► committed ──► ended
                   │                                                    └► it ends the output: the
                   └► aborted, expired, failed: the transfer is          transfer is aborted
                      aborted, and its end frees the blocks

What another node has cached of the prompt, and this node has not, can be pulled from there while
the prompt waits; see `prefix_pulls`.

The blocks that a step completes are known before it runs, so they are sent layer by layer while it
runs. Blocks that were pushed are not changed or freed until the connector reports the end of the
transfer: a prompt is never preempted, and a step that fails ends its transfers.

A failure is reported to the router, unless the decode node has revoked the lease: that node reports
why.

Where transfers read other memory than steps compute in (Paddle on a GPU), cached blocks go there
beside the steps. They are pushed when their copy has ended, and the commit follows the last push. A
transfer that ends earlier keeps its blocks until its copies have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from common.errors import InternalError, InvalidRequest, LayoutMismatch, PeerProtocolError
from common.kv.blocks import blocks_for
from common.request import FinishReason
from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.step.step_in_flight import PlannedStep, Pushes
from engine.core.step.step_results import StepOutput
from kv_transfer.contract import Commit, Revoked, Ticket, TransferEnded
from node.flow.attempts.attempt_table import HANDED_OFF, NodeAttempt, emit_tokens, refused
from node.flow.landing_place import LandingPlace
from node.flow.layers_to_push import LayersToPush
from node.flow.messages import (
    AbortTransfer,
    AnswerCall,
    CommitTransfer,
    Effect,
    OpenTransfer,
    PromptAccepted,
    PushBlocks,
    Submit,
)
from node.flow.shared_parts import SharedParts


@dataclass(slots=True)
class _Staging:
    """Copies of one transfer under way, and what waits for their end."""

    num_copies: int = 0
    commit: Commit | None = None
    end: TransferEnded | None = None


class SentPrompts:
    """The prompts of a node that are sent on; what others have cached of them may be pulled."""

    def __init__(self, shared: SharedParts, *, needs_staging: bool, place: LandingPlace) -> None:
        self._scheduler = shared.scheduler
        self._attempts = shared.attempts
        self._queue = shared.queue
        self._copies = shared.copies
        self._pulls = shared.pulls
        self._fail = shared.fail
        self._landing_place = place
        self._needs_staging = needs_staging
        self._staging: dict[int, _Staging] = {}
        """Copies out, by lease token, of blocks that are to be pushed."""
        self._tickets: dict[int, Ticket] = {}

    def __len__(self) -> int:
        """Return how many transfers are open."""
        return len(self._tickets)

    def submit(self, message: Submit, sequence_id: int, now_s: float) -> list[Effect]:
        """Take a new, valid prompt."""
        request, ticket = message.request, message.ticket
        problem = self._problem_with_ticket(message)
        if problem is not None:
            return [refused(self._scheduler, message, problem)]
        sequence = Sequence(sequence_id, request, is_exported=ticket is not None)
        attempt = NodeAttempt(
            request.id,
            message.router,
            sequence,
            now_s + request.deadline_s,
            message.received_at_s,
            is_prompt=True,
        )
        self._attempts.add(attempt)
        effects = self._queue.disk.begin(attempt, now_s)
        if message.source is not None:
            effects += self._pulls.begin(attempt, message.source, now_s)
        attempt.answer = PromptAccepted()
        self._queue.put(attempt, message)
        effects.append(AnswerCall(message.reply_to, attempt.answer))
        if ticket is not None:
            self._attempts.set_lease(attempt, ticket.lease_token)
            self._tickets[ticket.lease_token] = ticket
            # Opened at once: an open transfer renews its lease while the prompt waits here.
            priority = request.priority if self._scheduler.has_priorities else 0
            effects.append(OpenTransfer(ticket, request.deadline_s, priority))
        return effects

    def _problem_with_ticket(self, message: Submit) -> InvalidRequest | LayoutMismatch | None:
        request, ticket = message.request, message.ticket
        if ticket is None:
            if request.sampling.max_tokens == 1:
                return None
            return InvalidRequest(
                f"max_tokens is {request.sampling.max_tokens} and there is no ticket: "
                "a prompt that is not sent on ends with one token"
            )
        here = self._landing_place
        if ticket.fingerprint != here.fingerprint:
            return LayoutMismatch(
                f"KV layouts differ: here {here.kv_description} ({here.fingerprint}), on "
                f"{ticket.decode_node} {ticket.kv_description} ({ticket.fingerprint})"
            )
        size = self._scheduler.limits.block_size
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        num_targets = blocks_for(num_tokens, size) - ticket.num_cached_tokens // size
        if ticket.num_cached_tokens % size or num_targets != len(ticket.target_block_ids):
            return InvalidRequest(
                f"the ticket has {len(ticket.target_block_ids)} blocks from token "
                f"{ticket.num_cached_tokens} on: wanted {num_targets} blocks of {size} tokens"
            )
        return None

    def pushes(self, step: PlannedStep) -> Pushes[Effect] | None:
        """Return the pushes for a step.

        Blocks that are complete already are sent at once, those that the step completes layer by
        layer.
        """
        if not self._tickets:
            return None
        before: list[Effect] = []
        completed: list[PushBlocks] = []
        starts = step.batch.starts.tolist()
        ends = (step.batch.starts + step.batch.num_tokens).tolist()
        for sequence, start, end in zip(step.sequences, starts, ends, strict=True):
            if not sequence.is_exported:
                continue
            attempt = self._attempts.of_sequence(sequence)
            assert attempt is not None, "a scheduled sequence belongs to an attempt"
            if attempt.lease_token is None:
                continue
            size = self._scheduler.limits.block_size
            is_last = end == sequence.num_known
            before += map(self._push_cached, self._take_blocks(attempt, start // size))
            num_done = blocks_for(end, size) if is_last else end // size
            completed += self._take_blocks(attempt, num_done)
        if not completed:
            return Pushes(before, None) if before else None
        layers = LayersToPush(completed, self._landing_place.layer_bytes)
        return Pushes(before, layers.on_computed)

    def _push_cached(self, push: PushBlocks) -> Effect:
        """Push blocks that were computed before this step; first copy them where that is needed."""
        if not self._needs_staging:
            return push
        self._staging.setdefault(push.lease_token, _Staging()).num_copies += 1
        copy = CacheCopy(CopyKind.STAGE_OUT, push.source_blocks)
        return self._copies.begin(copy, partial(self._on_staged_out, push.lease_token), push)

    def _on_staged_out(self, lease_token: int, error: Exception | None) -> list[Effect]:
        staging = self._staging[lease_token]
        staging.num_copies -= 1
        if staging.num_copies == 0:
            del self._staging[lease_token]
        attempt = self._attempts.of_lease(lease_token)
        assert attempt is not None, "an attempt keeps its lease until its copies have ended"
        effects: list[Effect] = []
        if error is not None and not attempt.is_over and staging.end is None:
            wrong = InternalError(f"computed KV was not copied out: {error!r}")
            effects += self._fail(attempt, wrong)
        if staging.num_copies == 0:
            if staging.end is not None:
                effects += self._on_transfer_ended(attempt, staging.end)
            elif staging.commit is not None and not attempt.is_over:
                effects.append(CommitTransfer(lease_token, staging.commit))
        return effects

    def _take_blocks(self, attempt: NodeAttempt, end: int) -> list[PushBlocks]:
        """Return the push of the blocks up to `end` that were not pushed, if any, and mark them.

        The mark stays when the step fails, because its transfers are aborted.
        """
        assert attempt.lease_token is not None
        size = self._scheduler.limits.block_size
        skip = self._tickets[attempt.lease_token].num_cached_tokens // size
        start = max(attempt.num_pushed_blocks, skip)
        if end <= start:
            return []
        attempt.num_pushed_blocks = end
        source_blocks = tuple(attempt.sequence.blocks(start, end))
        ordinals = tuple(range(start - skip, end - skip))
        return [PushBlocks(attempt.lease_token, None, ordinals, source_blocks)]

    def on_output(self, attempt: NodeAttempt, output: StepOutput) -> list[Effect]:
        """Report token 0, and commit the transfer."""
        effects: list[Effect] = [emit_tokens(attempt, output)]
        if attempt.lease_token is None:
            self._attempts.remove(attempt)
            return effects
        if output.finish_reason is not None:
            attempt.is_over = True
            return [*effects, AbortTransfer(attempt.lease_token)]
        sequence = attempt.sequence
        commit = Commit(
            num_tokens=sequence.num_prompt + output.first_index,
            first_token_id=output.token_ids[0],
            draft_token_ids=tuple(sequence.proposed_token_ids),
        )
        staging = self._staging.get(attempt.lease_token)
        if staging is not None:
            staging.commit = commit
            return effects
        return [*effects, CommitTransfer(attempt.lease_token, commit)]

    def on_transfer_ended(self, event: TransferEnded) -> list[Effect]:
        """Handle the end of a transfer."""
        attempt = self._attempts.of_lease(event.lease_token)
        if attempt is None:
            return []
        staging = self._staging.get(event.lease_token)
        if staging is not None:
            staging.end = event
            return []
        return self._on_transfer_ended(attempt, event)

    def _on_transfer_ended(self, attempt: NodeAttempt, event: TransferEnded) -> list[Effect]:
        ticket = self._tickets.pop(event.lease_token)
        self._attempts.clear_lease(attempt)
        attempt.transfer = event.timing
        if event.error is None and event.timing is not None:
            num_tokens = len(ticket.target_block_ids) * self._scheduler.limits.block_size
            self._pulls.cost.on_sent(num_tokens, event.timing.sending_s)
        error = event.error
        if error is None and attempt.sequence.status is not SequenceStatus.EXPORTING:
            error = PeerProtocolError("the transfer was acknowledged before it was committed")
        if isinstance(error, Revoked) and not attempt.is_over:
            # The decode node ended the attempt, and tells its router why, or was asked to. A second
            # word here could be heard before that.
            attempt.outcome = FinishReason.ABORT.value
            return self.release(attempt)
        if error is not None and not attempt.is_over:
            return self._fail(attempt, error)
        if attempt.sequence.status is SequenceStatus.EXPORTING:
            self._scheduler.release(attempt.sequence)
        attempt.outcome = attempt.outcome or HANDED_OFF
        self._attempts.remove(attempt)
        return []

    def release(self, attempt: NodeAttempt) -> list[Effect]:
        """Release an attempt that is not over: its sequence, and its blocks when nobody reads."""
        if attempt.lease_token is None:
            self._end_sequence(attempt)
            self._attempts.remove(attempt)
            return self._pulls.leave(attempt)
        attempt.is_over = True
        if attempt.sequence.status is not SequenceStatus.EXPORTING:
            self._queue.finish(attempt, keep_blocks=True)
        return [AbortTransfer(attempt.lease_token), *self._pulls.leave(attempt)]

    def _end_sequence(self, attempt: NodeAttempt) -> None:
        if attempt.sequence.status is SequenceStatus.EXPORTING:
            self._scheduler.release(attempt.sequence)
        else:
            self._queue.finish(attempt)
