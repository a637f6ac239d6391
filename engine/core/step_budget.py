"""The remaining budgets of one step: tokens, blocks, seats."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.step_plan import (
    Chunk,
    Limits,
    PlanPolicy,
    PoolView,
    Preemption,
    PreemptionReason,
    SequenceView,
    StepPlan,
)


class StepBudget:
    """The rest of a step's budgets, and the plan so far. Only the planner's modules write to it."""

    def __init__(self, limits: Limits, pool: PoolView, policy: PlanPolicy, num_seats: int) -> None:
        self.plan = StepPlan()
        self.limits = limits
        self.pool = pool
        self.policy = policy
        self.num_seats = num_seats
        self.tokens_left = limits.max_num_batched_tokens
        self.available = pool.num_available
        self._longest_chunk = limits.max_num_batched_tokens

    def preempt(self, victim: SequenceView, reason: PreemptionReason, num_freed: int) -> None:
        """Preempt `victim`: take back its seat, its planned chunk and `num_freed` blocks."""
        self.plan.preempted.append(Preemption(victim.sequence_id, reason))
        self.available += num_freed
        self.num_seats += 1
        planned = self.plan.chunks.pop(victim.sequence_id, None)
        if planned is not None:
            self.available += planned.num_new_blocks
            self.tokens_left += planned.num_tokens + planned.num_drafts
            self.plan.num_decode_tokens -= planned.num_tokens
            self.plan.num_draft_tokens -= planned.num_drafts

    def plan_decode(self, sequence: SequenceView, num_new_blocks: int, num_drafts: int) -> None:
        """Plan one known token and its drafts."""
        self.plan.chunks[sequence.sequence_id] = Chunk(
            sequence.sequence_id, 1, num_new_blocks, num_drafts
        )
        self.plan.num_decode_tokens += 1
        self.plan.num_draft_tokens += num_drafts
        self.tokens_left -= 1 + num_drafts
        self.available -= num_new_blocks

    def plan_chunk(self, sequence: SequenceView, num_tokens: int) -> None:
        """Plan `num_tokens` of a prompt, beyond those planned for it already."""
        chunk = self.plan.chunks.setdefault(sequence.sequence_id, Chunk(sequence.sequence_id, 0))
        chunk.num_tokens += num_tokens
        self.plan.num_chunk_tokens += num_tokens
        self.tokens_left -= num_tokens

    def limit_chunks(self, num_tokens: int) -> None:
        """Give one prompt at most `num_tokens` in this step, but a granule; 0: no limit."""
        if num_tokens:
            self._longest_chunk = max(num_tokens, self.limits.chunk_granularity)

    def capped(self, num_tokens: int) -> int:
        """Return the tokens of a chunk of `num_tokens` that one prompt may have in a step."""
        return min(num_tokens, self._longest_chunk)

    def plan_plain_decodes(
        self, sequences: Sequence[SequenceView], num_new_blocks: Sequence[int]
    ) -> None:
        """Plan one known token each, as `plan_decode` does; no more than there are tokens left."""
        if len(sequences) > self.tokens_left:
            sequences = sequences[: self.tokens_left]
            num_new_blocks = num_new_blocks[: self.tokens_left]
        self.plan.chunks |= {
            sequence.sequence_id: Chunk(sequence.sequence_id, 1, count)
            for sequence, count in zip(sequences, num_new_blocks, strict=True)
        }
        self.plan.num_decode_tokens += len(sequences)
        self.tokens_left -= len(sequences)
        self.available -= sum(num_new_blocks)

    def chunk_tokens(self, num_uncomputed: int, num_kept: int = 0) -> int:
        """Return how many tokens of a prompt this step computes; 0 if no granule fits.

        `num_kept` tokens are left over. A negative number is what the prompt has been given
        already.
        """
        most = self.capped(max(self.tokens_left - num_kept, 0))
        if num_uncomputed <= most:
            return num_uncomputed
        return most - most % self.limits.chunk_granularity
