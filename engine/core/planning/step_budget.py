"""The remaining budgets of one step: tokens, blocks, seats, and the work of its prompts.

A chunk costs more the further from the start of its prompt it lies: a token costs its matrix
products, the same for each, and its attention to all tokens before it. Work is counted in pairs of
a token and one that it attends to: the matrix products of one token cost as much as
`pairs_per_token` of them, by the model's shape (27,000 for an 8B model, so after 27,000 tokens of
context a token costs twice as much as the first one). Integers only, so that the same input gives
the same chunk on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt

from engine.core.planner_contract import (
    PLAIN_DECODE,
    Admission,
    Chunk,
    PlanPolicy,
    PoolView,
    Preemption,
    PreemptionReason,
    SequenceView,
    StepLimits,
    StepPlan,
)

_LEAST_SHARE = 8
"""However long their context is, prompts get at least an eighth of the tokens that decodes leave: a
prompt that is never computed would keep its blocks for ever."""


class StepBudget:
    """The rest of a step's budgets, and the plan so far. Only the planner's modules write to it."""

    def __init__(
        self,
        limits: StepLimits,
        pool: PoolView,
        policy: PlanPolicy,
        num_seats: int,
        num_coming: int,
    ) -> None:
        self.plan = StepPlan()
        self.limits = limits
        self.pool = pool
        self.policy = policy
        self.num_seats = num_seats
        self.tokens_left = limits.max_num_batched_tokens
        self.available = pool.num_available
        self.coming = num_coming
        """Blocks that will be available when copies to host memory have ended."""
        self.growing: list[tuple[SequenceView, int]] = []
        """Decoding sequences that get blocks, and how many, as they were planned."""
        self._longest_chunk = limits.max_num_batched_tokens
        self._work_left: int | None = None
        self._least_chunk_tokens = 0

    def preempt(self, victim: SequenceView, reason: PreemptionReason, num_freed: int) -> None:
        """Preempt `victim`: take back its seat, its planned chunk and `num_freed` blocks."""
        self.plan.preempted.append(Preemption(victim.sequence_id, reason))
        if self.policy.swaps_late:
            self.coming += num_freed
        else:
            self.available += num_freed
        self.num_seats += 1
        planned = self.plan.chunks.pop(victim.sequence_id, None)
        if planned is not None:
            self.available += planned.num_new_blocks
            self._give_back(planned.num_tokens + planned.num_drafts)
            self.plan.num_decode_tokens -= planned.num_tokens
            self.plan.num_draft_tokens -= planned.num_drafts

    def plan_decodes(self, sequences: Sequence[SequenceView], more: Mapping[int, Chunk]) -> None:
        """Plan one known token of each; no more than there are tokens left.

        `more` are the chunks with new blocks or drafts, by index, in order. To be called before
        anything else is planned.
        """
        plan, sequences = self.plan, sequences[: self.tokens_left]
        plan.chunks = dict.fromkeys([s.sequence_id for s in sequences], PLAIN_DECODE)
        plan.num_decode_tokens = len(sequences)
        for index, chunk in more.items():
            if index >= len(sequences):
                break
            sequence, count = sequences[index], chunk.num_new_blocks
            plan.chunks[sequence.sequence_id] = chunk
            plan.num_draft_tokens += chunk.num_drafts
            if count:
                self.growing.append((sequence, count))
                self.available -= count
        self.tokens_left -= plan.num_decode_tokens + plan.num_draft_tokens

    def plan_chunk(self, sequence: SequenceView, num_tokens: int) -> None:
        """Plan `num_tokens` of a prompt, beyond those planned for it already."""
        planned = self.plan.chunks.get(sequence.sequence_id)
        num_planned = 0 if planned is None else planned.num_tokens
        self._charge(sequence.num_computed + num_planned, num_tokens)
        self.plan.chunks[sequence.sequence_id] = Chunk(num_planned + num_tokens)

    def plan_admission(self, admission: Admission, start: int, num_claimed: int) -> None:
        """Plan an admission with its first chunk after `start` tokens.

        `num_claimed` of its cached blocks were available to others.
        """
        self.plan.admissions.append(admission)
        self._charge(start, admission.num_tokens)
        self.available -= admission.num_new_blocks + num_claimed
        self.num_seats -= 1

    def bound_work(self) -> None:
        """Let this step's chunks take no more work than a whole step at the start of a prompt.

        To be called when the step's decodes are planned. Without any, no output waits for the end
        of the step, and chunks are as long as the token budget allows.
        """
        pairs = self.limits.pairs_per_token
        if pairs and self.plan.num_decode_tokens:
            most = self.limits.max_num_batched_tokens
            num_decoded = most - self.tokens_left
            self._work_left = chunk_work(0, most, pairs) - num_decoded * pairs
            self._least_chunk_tokens = max(
                self.tokens_left // _LEAST_SHARE, self.limits.chunk_granularity
            )

    def limit_chunks(self, num_tokens: int) -> None:
        """Give one prompt at most `num_tokens` in this step, but a granule; 0: no limit."""
        if num_tokens:
            self._longest_chunk = max(num_tokens, self.limits.chunk_granularity)

    def capped(self, num_tokens: int) -> int:
        """Return the tokens of a chunk of `num_tokens` that one prompt may have in a step."""
        return min(num_tokens, self._longest_chunk)

    def chunk_tokens(
        self, start: int, num_uncomputed: int, *, num_kept: int, num_planned: int = 0
    ) -> int:
        """Return how many tokens of a prompt this step computes; 0 if no granule fits.

        The first of its `num_uncomputed` tokens is at position `start`; `num_planned` of them are
        planned already, and count. `num_kept` tokens are left over. If it is negative, so many
        tokens more are assumed to be left.
        """
        most = self.tokens_left - num_kept + num_planned
        if self._work_left is not None:
            most = min(most, self._tokens_by_work(start, num_kept, num_planned))
        most = self.capped(max(most, 0))
        if num_uncomputed <= most:
            return num_uncomputed
        return most - most % self.limits.chunk_granularity

    def _tokens_by_work(self, start: int, num_kept: int, num_planned: int) -> int:
        assert self._work_left is not None
        pairs = self.limits.pairs_per_token
        work = self._work_left - num_kept * pairs + chunk_work(start, num_planned, pairs)
        least = self._least_chunk_tokens - self.plan.num_chunk_tokens + num_planned
        return max(tokens_within(work, start, pairs), least)

    def _charge(self, start: int, num_tokens: int) -> None:
        self.plan.num_chunk_tokens += num_tokens
        self.tokens_left -= num_tokens
        if self._work_left is not None:
            self._work_left -= chunk_work(start, num_tokens, self.limits.pairs_per_token)

    def _give_back(self, num_decode_tokens: int) -> None:
        self.tokens_left += num_decode_tokens
        if self._work_left is not None:
            self._work_left += num_decode_tokens * self.limits.pairs_per_token


def chunk_work(start: int, num_tokens: int, pairs_per_token: int) -> int:
    """Return the work of `num_tokens` tokens after `start` others, in pairs."""
    return num_tokens * (2 * (pairs_per_token + start) + num_tokens + 1) // 2


def tokens_within(work: int, start: int, pairs_per_token: int) -> int:
    """Return the most tokens after `start` others whose `chunk_work` is at most `work`; 0 or more.

    It is the root of `n² + (2 (pairs_per_token + start) + 1) n - 2 work`, rounded down.
    """
    if work <= 0:
        return 0
    linear = 2 * (pairs_per_token + start) + 1
    return (isqrt(linear * linear + 8 * work) - linear) // 2
