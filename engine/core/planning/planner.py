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
from engine.core.planning.chunk_plan import ChunkPlan
from engine.core.planning.decode_plan import plan_decodes
from engine.core.planning.step_budget import StepBudget
from engine.core.policies.growth import GrowthColumns, Ints
from engine.core.sequences.status import SequenceStatus


def plan_step(
    *,
    running: Sequence[SequenceView],
    num_lacking: Ints,
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

    `num_lacking[i]` blocks are missing for the last known token of `running[i]`, if it decodes.
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
        num_lacking = num_lacking[[s.status is decode for s in running]]
    num_seats = limits.max_num_seqs - len(running) - len(receiving)
    budget = StepBudget(limits, pool, policy, num_seats, num_coming)
    if decoding:
        decoding = plan_decodes(
            budget,
            decoding,
            num_lacking,
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
    assert plan.num_tokens <= limits.max_num_batched_tokens, "a step exceeds its token budget"
    assert plan.num_tokens + budget.tokens_left == limits.max_num_batched_tokens, "miscounted"
    assert budget.available >= 0, "a step hands out blocks that it does not have"
    return plan
