"""The life of a request on a prefill node, from the prompt to the last acknowledged block. Pure.

    Prefill ──► refused
       └──────► accepted ──► chunks, pushed as they are computed ──► token 0 ──► committed ──► ended
                   │                                                    └► it ends the output: the
                   └► aborted, expired, failed: the transfer is          transfer is aborted
                      aborted, and its end frees the blocks

Blocks that were pushed stay as they are until the connector says that the transfer has ended.
"""

from __future__ import annotations

from common.blocks import blocks_for
from common.errors import InvalidRequest, LayoutMismatch, PeerProtocolError
from engine.core.planned_step import PlannedStep, StepOutput
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.status import SequenceStatus
from kv_transfer.connector import Commit, Landed, LandingFailed, Ticket, TransferEnded
from node.messages import (
    AbortTransfer,
    Accepted,
    CommitTransfer,
    Effect,
    OpenTransfer,
    PushBlocks,
    Reply,
    Submit,
)
from node.node_flow import FlowLimits, NodeFlow
from node.request_book import Held


class PrefillFlow(NodeFlow):
    """Decisions of a prefill node."""

    def __init__(
        self, scheduler: Scheduler, limits: FlowLimits, *, fingerprint: str, kv_description: str
    ) -> None:
        super().__init__(scheduler, limits)
        self._fingerprint = fingerprint
        self._kv_description = kv_description
        self._tickets: dict[int, Ticket] = {}

    def _submit(self, message: Submit, now_s: float) -> list[Effect]:
        request, ticket = message.request, message.ticket
        problem = self._problem_with_ticket(message)
        if problem is not None:
            return [self._refuse(message, problem)]
        sequence = Sequence(next(self._sequence_ids), request, is_exported=ticket is not None)
        held = Held(
            request.id, message.router, sequence, now_s + request.deadline_s, answer=Accepted()
        )
        self.book.add(held)
        self.scheduler.add(sequence)
        effects: list[Effect] = [Reply(message.reply_to, Accepted())]
        if ticket is not None:
            self.book.set_lease(held, ticket.lease_token)
            self._tickets[ticket.lease_token] = ticket
            # Opened at once: an open transfer keeps its lease alive while the prompt waits here.
            effects.append(OpenTransfer(ticket, request.deadline_s))
        return effects

    def _problem_with_ticket(self, message: Submit) -> InvalidRequest | LayoutMismatch | None:
        request, ticket = message.request, message.ticket
        if ticket is None:
            if request.sampling.max_tokens == 1:
                return None
            return InvalidRequest(
                f"max_tokens is {request.sampling.max_tokens} and there is no ticket: "
                "a prefill node alone draws one token"
            )
        if ticket.fingerprint != self._fingerprint:
            return LayoutMismatch(
                f"KV layouts differ: here {self._kv_description} ({self._fingerprint}), on "
                f"{ticket.decode_node} {ticket.kv_description} ({ticket.fingerprint})"
            )
        size = self.scheduler.limits.block_size
        num_targets = blocks_for(len(request.prompt_token_ids), size) - (
            ticket.num_cached_tokens // size
        )
        if ticket.num_cached_tokens % size or num_targets != len(ticket.target_block_ids):
            return InvalidRequest(
                f"the ticket has {len(ticket.target_block_ids)} blocks from token "
                f"{ticket.num_cached_tokens} on: wanted {num_targets} blocks of {size} tokens"
            )
        if ticket.lease_token in self._tickets:
            return InvalidRequest(f"lease {ticket.lease_token:#x} is in use by another attempt")
        return None

    def _after_step(self, step: PlannedStep, outputs: list[StepOutput]) -> list[Effect]:
        drawn = {output.sequence.sequence_id: output for output in outputs}
        effects: list[Effect] = []
        for sequence in step.sequences:
            held = self.book.of_sequence(sequence)
            assert held is not None, "a scheduled sequence belongs to an attempt"
            output = drawn.get(sequence.sequence_id)
            if output is None:
                effects += self._push_computed(held)
            else:
                effects += self._on_first_token(held, output)
        return effects

    def _on_first_token(self, held: Held, output: StepOutput) -> list[Effect]:
        effects: list[Effect] = [self._emit_tokens(held, output)]
        if held.lease_token is None:
            self.book.remove(held)
            return effects
        if output.finish_reason is not None:
            held.is_over = True
            return [*effects, AbortTransfer(held.lease_token)]
        effects += self._push_computed(held)
        sequence = held.sequence
        commit = Commit(
            num_tokens=sequence.num_prompt,
            first_token_id=output.tokens[0].token_id,
            draft_token_ids=tuple(sequence.proposed_token_ids),
        )
        return [*effects, CommitTransfer(held.lease_token, commit)]

    def _push_computed(self, held: Held) -> list[Effect]:
        """Blocks completed since the last push; with the prompt done, its last partial one too."""
        if held.lease_token is None:
            return []
        sequence = held.sequence
        size = self.scheduler.limits.block_size
        skip = self._tickets[held.lease_token].num_cached_tokens // size
        is_done = sequence.num_computed == sequence.num_prompt
        end = blocks_for(sequence.num_prompt, size) if is_done else sequence.num_computed // size
        start = max(held.num_pushed_blocks, skip)
        if end <= start:
            return []
        held.num_pushed_blocks = end
        return [
            PushBlocks(
                held.lease_token,
                tuple(range(start - skip, end - skip)),
                tuple(sequence.block_table[start:end]),
            )
        ]

    def _on_kv_event(
        self, event: Landed | LandingFailed | TransferEnded, now_s: float
    ) -> list[Effect]:
        held = self.book.of_lease(event.lease_token)
        if held is None or not isinstance(event, TransferEnded):
            return []
        del self._tickets[event.lease_token]
        self.book.clear_lease(held)
        error = event.error
        if error is None and held.sequence.status is not SequenceStatus.EXPORTING:
            error = PeerProtocolError("the transfer was acknowledged before it was committed")
        if error is not None and not held.is_over:
            return self._fail(held, error)
        if held.sequence.status is SequenceStatus.EXPORTING:
            self.scheduler.release(held.sequence)
        self.book.remove(held)
        return []

    def _let_go(self, held: Held) -> list[Effect]:
        if held.lease_token is None:
            self._end_sequence(held)
            self.book.remove(held)
            return []
        held.is_over = True
        if held.sequence.status is not SequenceStatus.EXPORTING:
            self.scheduler.finish(held.sequence, keep_blocks=True)
        return [AbortTransfer(held.lease_token)]

    def _end_sequence(self, held: Held) -> None:
        if held.sequence.status is SequenceStatus.EXPORTING:
            self.scheduler.release(held.sequence)
        else:
            self.scheduler.finish(held.sequence)
