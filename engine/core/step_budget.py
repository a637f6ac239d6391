"""The remaining budgets of one step: tokens, blocks, seats."""

from __future__ import annotations

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

    def chunk_tokens(self, num_uncomputed: int) -> int:
        """Return how many tokens of a prompt this step computes; 0 if no granule fits."""
        if num_uncomputed <= self.tokens_left:
            return num_uncomputed
        return self.tokens_left - self.tokens_left % self.limits.chunk_granularity
