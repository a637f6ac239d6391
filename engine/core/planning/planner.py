"""What one step runs: a pure function of running and waiting sequences, limits and policies.

There is no prefill phase and no decode phase: every sequence is given tokens so that its computed
tokens catch up with its known ones, drafts included. The order of one step is

1. decoding sequences, one token and its drafts each, with the blocks these may need;
2. running prefill chunks, by arrival, or by priority where priorities count;
3. admissions from the queue, while seats, blocks and budget last.

Each sequence is charged the tokens that it really adds to the step. Only decoding sequences are
preempted. At least one of them is kept, unless a more urgent sequence takes its place. A preempted
sequence is not seated again in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from itertools import accumulate, islice

from engine.core.planner_contract import (
    MatchPrefix,
    PlanPolicy,
    PoolView,
    SequenceView,
    StepLimits,
    StepPlan,
    StopRule,
)
from engine.core.planning.admission_plan import plan_admissions
from engine.core.planning.decode_plan import plan_decodes
from engine.core.planning.step_budget import StepBudget
from engine.core.policies.growth import GrowthColumns, Lacking
from engine.core.sequences.status import SequenceStatus

_LEAST_SHARE = 8
"""The prompt that arrived first gets an eighth of the tokens beside more urgent ones."""


def plan_step(
    *,
    running: Sequence[SequenceView],
    lacking: Sequence[Lacking],
    receiving: Sequence[SequenceView],
    waiting: Collection[SequenceView],
    num_exporting: int,
    growth: Callable[[], GrowthColumns],
    pool: PoolView,
    match_prefix: MatchPrefix,
    limits: StepLimits,
    policy: PlanPolicy,
    num_copies: int = 0,
    num_coming: int = 0,
    awaiting: Set[int] = frozenset(),
) -> StepPlan:
    """Plan one step. `running` is by arrival, `waiting` in the order of the queue.

    `lacking` are those of `running` that decode and have no block for their last known token, by
    index, and how many they need.
    `receiving` sequences hold seats and blocks while their KV arrives. `num_exporting` sequences
    have no seat, but their blocks are still read by a transfer, or may still be written. Blocks are
    also held by `num_copies` copies of KV, and for prefixes from and to other nodes; `num_coming`
    will be available when the copies end. Sequences of `awaiting`, by id, are not admitted yet,
    because what they begin with is being copied.
    `growth` returns the columns of all seated sequences; it is called only if admissions are tried.
    """
    # Looking up the enum member once: in the loop it would cost more than the rest.
    decode = SequenceStatus.RUNNING_DECODE
    decoding = [s for s in running if s.status is decode]
    prefilling: list[SequenceView] = []
    if len(decoding) < len(running):
        prefilling = [s for s in running if s.status is not decode]
        if lacking:
            is_decode = [s.status is decode for s in running]
            num_before = list(accumulate(is_decode, initial=0))
            lacking = [(num_before[i], num) for i, num in lacking if is_decode[i]]
    num_seats = limits.max_num_seqs - len(running) - len(receiving)
    budget = StepBudget(limits, pool, policy, num_seats, num_coming)
    if decoding:
        decoding = plan_decodes(
            budget,
            decoding,
            lacking,
            is_anything_else_held=bool(prefilling or receiving or num_exporting or num_copies),
        )
        budget.bound_work()
    chunks = ChunkPlan(budget, prefilling, waiting)
    chunks.before_admissions()
    plan = budget.plan
    if plan.preempted:
        plan.stopped_by = StopRule.PREEMPTED
    elif plan.stopped_by not in (StopRule.NO_VICTIM, StopRule.COPYING):
        seated = [*decoding, *prefilling, *receiving]
        plan_admissions(
            budget,
            waiting,
            seated=seated,
            growth=growth,
            match_prefix=match_prefix,
            awaiting=awaiting,
        )
    chunks.after_admissions()
    num_tokens = plan.num_tokens
    assert num_tokens <= limits.max_num_batched_tokens, "a step exceeds its token budget"
    assert num_tokens + budget.tokens_left == limits.max_num_batched_tokens, "miscounted"
    assert budget.available >= 0, "a step hands out blocks that it does not have"
    return plan


class ChunkPlan:
    """The chunks of the running prompts: before admissions, and what those leave after them.

    By arrival, each prompt takes what it can. Where priorities count, more urgent prompts go first,
    and tokens are kept for those that still wait. In return the prompt that arrived first always
    gets a share, so that urgent work cannot stop it. While several prompts compete, a chunk can
    have an upper limit, so that a short prompt does not wait for the whole of a long one.
    """

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
