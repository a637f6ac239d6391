"""Prefill chunks of one step: which prompt gets how much of the token budget.

By arrival, each prompt takes what it can. Where priorities count, more urgent prompts go first, and
tokens are kept for those that still wait. In return the prompt that arrived first always gets a
share, so that urgent work cannot stop it. While several prompts compete, a chunk can have an upper
limit, so that a short prompt does not wait for the whole of a long one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from engine.core.planner_contract import SequenceView
from engine.core.planning.step_budget import StepBudget

_LEAST_SHARE = 8
"""The prompt that arrived first gets an eighth of the tokens beside more urgent ones."""


class ChunkPlan:
    """The chunks of the running prompts: before admissions, and what those leave after them."""

    def __init__(
        self,
        budget: StepBudget,
        prefilling: Sequence[SequenceView],
        waiting: Collection[SequenceView],
    ) -> None:
        """Plan for `prefilling`, by arrival, with `waiting` in the order of the queue."""
        self._budget = budget
        self._prompts = prefilling
        self._urgent: list[SequenceView] = []
        if len(prefilling) + len(waiting) > 1:
            budget.limit_chunks(budget.policy.config.long_prefill_token_threshold)
        if budget.policy.config.enable_priority_scheduling and prefilling:
            self._prompts = sorted(prefilling, key=lambda s: -s.priority)
            least = self._prompts[-1].priority
            window = islice(waiting, budget.policy.config.skip_ahead_window + 1)
            self._urgent = [s for s in window if s.priority > least and not s.has_remote_kv]
            if self._urgent or self._prompts[0].priority > prefilling[0].priority:
                granule = budget.limits.chunk_granularity
                share = max(budget.tokens_left // _LEAST_SHARE, granule)
                self._extend(prefilling[0], budget.tokens_left - share)

    def before_admissions(self) -> None:
        """Plan chunks, and leave tokens for more urgent prompts that wait."""
        for sequence in self._prompts:
            num_kept = sum(
                self._budget.capped(one.num_known)
                for one in self._urgent
                if one.priority > sequence.priority
            )
            self._extend(sequence, num_kept)

    def after_admissions(self) -> None:
        """Give the tokens that no urgent prompt took to the running ones."""
        if self._urgent:
            for sequence in self._prompts:
                self._extend(sequence, 0)

    def _extend(self, sequence: SequenceView, num_kept: int) -> None:
        """Make the chunk of `sequence` as long as possible, with `num_kept` tokens left over."""
        budget = self._budget
        planned = budget.plan.chunks.get(sequence.sequence_id)
        num_planned = planned.num_tokens if planned is not None else 0
        num_tokens = budget.chunk_tokens(
            sequence.num_computed,
            sequence.num_known - sequence.num_computed,
            num_kept=num_kept,
            num_planned=num_planned,
        )
        if num_tokens > num_planned:
            budget.plan_chunk(sequence, num_tokens - num_planned)
