"""Decoding sequences in a step: their blocks, their drafts, and preemption when blocks run out.

Every decoding sequence computes its last known token, regardless of the prefills beside it. If the
block for that token is missing, other sequences are preempted. Drafts use only what is left after
that, so drafts are trimmed before a sequence is preempted.
"""

from __future__ import annotations

import numpy as np

from engine.core.planner_contract import PreemptionReason, SequenceView, StopRule
from engine.core.planning.step_budget import StepBudget
from engine.core.policies.growth import Ints
from engine.core.policies.victims import (
    headroom_blocks,
    lowest_priority_first,
    spare_recently_resumed,
)


def plan_decodes(
    budget: StepBudget,
    decoding: list[SequenceView],
    new: Ints,
    *,
    is_anything_else_held: bool,
) -> list[SequenceView]:
    """Plan all of `decoding`, in order of arrival; return the sequences that keep their blocks.

    Each needs `new` blocks for its last known token, and those for its drafts.
    `is_anything_else_held`: prefills, transfers or exports hold blocks that they will release.
    Otherwise a single remaining sequence that cannot grow never will.
    """
    size = budget.limits.block_size
    num_needed = int(new.sum())
    if num_needed > budget.available + budget.coming:
        decoding, num_needed = _retract(budget, decoding, num_needed)
        new = np.array([_blocks_needed(s, 0, size) for s in decoding], np.int64)
    if budget.available < num_needed <= budget.available + budget.coming:
        budget.plan.stopped_by = StopRule.COPYING
        _plan_those_that_fit(budget, decoding, new)
    elif num_needed > budget.available:
        # The last one left: it waits until held blocks are released, or until it is preempted.
        budget.plan.stopped_by = StopRule.NO_VICTIM
        if not is_anything_else_held:
            budget.plan.starved.append(decoding[0].sequence_id)
    else:
        budget.plan_decodes(decoding, *_with_drafts(budget, decoding, new))
    return decoding


def _plan_those_that_fit(budget: StepBudget, decoding: list[SequenceView], new: Ints) -> None:
    """Plan one token of each sequence for which blocks are left; the others wait for copies."""
    chosen: list[int] = []
    num_left = budget.available
    for number, num_new in enumerate(new.tolist()):
        if num_new <= num_left:
            chosen.append(number)
            num_left -= num_new
    new = new[chosen]
    budget.plan_decodes([decoding[number] for number in chosen], new, np.zeros_like(new))


def _with_drafts(budget: StepBudget, decoding: list[SequenceView], new: Ints) -> tuple[Ints, Ints]:
    """Return how many blocks and drafts each sequence gets: as many drafts as are left over."""
    num_drafts = np.zeros(len(new), np.int64)
    spare_tokens = budget.tokens_left - len(decoding)
    if budget.limits.num_speculative_tokens == 0 or spare_tokens <= 0:
        return new, num_drafts
    size, num_blocks = budget.limits.block_size, new.copy()
    spare_blocks = budget.available - int(new.sum())
    for number, num_new in enumerate(new.tolist()):
        sequence = decoding[number]
        if sequence.draft_token_ids and spare_tokens > 0:
            most_held = sequence.num_held_blocks + num_new + spare_blocks
            num_slots = most_held * size - sequence.num_computed - 1
            count = min(_wanted_drafts(budget, sequence, spare_tokens), num_slots)
            num_blocks[number] = num_with_drafts = _blocks_needed(sequence, count, size)
            num_drafts[number] = count
            spare_blocks -= num_with_drafts - num_new
            spare_tokens -= count
    return num_blocks, num_drafts


def new_blocks(
    num_computed: int, num_tokens: int, lookahead: int, num_held: int, block_size: int
) -> int:
    """Return the blocks to add so that `num_tokens` more tokens and `lookahead` slots fit.

    `lookahead` counts tokens, not blocks, and is 0 unless the step samples: chunks in the middle of
    a prompt draft nothing. Never negative: a table that is longer than needed stays as it is.
    """
    missing = -(-(num_computed + num_tokens + lookahead) // block_size) - num_held
    return missing if missing > 0 else 0


def _blocks_needed(sequence: SequenceView, num_drafts: int, block_size: int) -> int:
    return new_blocks(sequence.num_computed, 1, num_drafts, sequence.num_held_blocks, block_size)


def _wanted_drafts(budget: StepBudget, sequence: SequenceView, spare_tokens: int) -> int:
    """Return how many drafts could still be output; the model adds one token of its own."""
    limits = budget.limits
    return max(
        min(
            len(sequence.draft_token_ids),
            limits.num_speculative_tokens,
            sequence.max_new_tokens - sequence.num_output - 1,
            limits.max_model_len - sequence.num_known - 1,
            spare_tokens,
        ),
        0,
    )


def _retract(
    budget: StepBudget, decoding: list[SequenceView], num_needed: int
) -> tuple[list[SequenceView], int]:
    """Preempt until all remaining sequences can grow for some steps.

    Returns the remaining sequences and the number of blocks that they need.
    """
    policy, limits = budget.policy, budget.limits
    victims = policy.victim_order(decoding)
    if policy.config.enable_priority_scheduling:
        victims = lowest_priority_first(victims)
    victims = spare_recently_resumed(victims, policy.config.min_progress_tokens)
    left = {s.sequence_id: s for s in decoding}
    for victim in victims:
        if len(left) == 1:
            break
        if budget.plan.preempted:
            headroom = headroom_blocks(
                list(left.values()),
                retract_decode_steps=policy.config.retract_decode_steps,
                tokens_per_seq=limits.tokens_per_seq,
                block_size=limits.block_size,
            )
            if num_needed + headroom <= budget.available + budget.coming:
                break
        view = left.pop(victim.sequence_id)
        num_needed -= _blocks_needed(view, 0, limits.block_size)
        num_freed = sum(map(budget.pool.is_unshared, view.block_table))
        budget.preempt(view, PreemptionReason.BLOCKS, num_freed)
    return list(left.values()), num_needed
