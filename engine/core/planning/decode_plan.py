"""Decoding sequences in a step: their blocks, their drafts, and preemption when blocks run out.

Every decoding sequence computes its last known token, regardless of the prefills beside it. If the
block for that token is missing, other sequences are preempted. Drafts use only what is left after
that, so drafts are trimmed before a sequence is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.planner_contract import (
    Chunk,
    PreemptionReason,
    SequenceView,
    StopRule,
)
from engine.core.planning.step_budget import StepBudget
from engine.core.policies.growth import Lacking
from engine.core.policies.victims import (
    headroom_blocks,
    lowest_priority_first,
    spare_recently_resumed,
)


def plan_decodes(
    budget: StepBudget,
    decoding: list[SequenceView],
    lacking: Sequence[Lacking],
    *,
    is_anything_else_held: bool,
) -> list[SequenceView]:
    """Plan all of `decoding`, in order of arrival; return the sequences that keep their blocks.

    Those of `lacking`, by index, need blocks for their last known token; drafts need others.
    `is_anything_else_held`: prefills, transfers or exports hold blocks that they will release.
    Otherwise a single remaining sequence that cannot grow never will.
    """
    size = budget.limits.block_size
    num_needed = sum(num for _, num in lacking)
    if num_needed > budget.available + budget.coming:
        decoding, num_needed = _retract(budget, decoding, num_needed)
        needs = enumerate(_blocks_needed(s, 0, size) for s in decoding)
        lacking = [(index, num) for index, num in needs if num]
    if budget.available < num_needed <= budget.available + budget.coming:
        budget.plan.stopped_by = StopRule.COPYING
        _plan_those_that_fit(budget, decoding, lacking)
    elif num_needed > budget.available:
        # The last one left: it waits until held blocks are released, or until it is preempted.
        budget.plan.stopped_by = StopRule.NO_VICTIM
        if not is_anything_else_held:
            budget.plan.starved.append(decoding[0].sequence_id)
    else:
        budget.plan_decodes(decoding, _with_drafts(budget, decoding, lacking))
    return decoding


def _plan_those_that_fit(
    budget: StepBudget, decoding: list[SequenceView], lacking: Sequence[Lacking]
) -> None:
    """Plan one token of each sequence for which blocks are left; the others wait for copies."""
    chosen: list[SequenceView] = []
    more: dict[int, Chunk] = {}
    num_left, needs = budget.available, dict(lacking)
    for index, sequence in enumerate(decoding):
        num_new = needs.get(index, 0)
        if num_new <= num_left:
            if num_new:
                more[len(chosen)] = Chunk(1, num_new)
            chosen.append(sequence)
            num_left -= num_new
    budget.plan_decodes(chosen, more)


def _with_drafts(
    budget: StepBudget, decoding: list[SequenceView], lacking: Sequence[Lacking]
) -> dict[int, Chunk]:
    """Return the chunks with new blocks or drafts, by index: as many drafts as are left over."""
    spare_tokens = budget.tokens_left - len(decoding)
    if budget.limits.num_speculative_tokens == 0 or spare_tokens <= 0:
        return {index: Chunk(1, num_new) for index, num_new in lacking}
    size, needs, more = budget.limits.block_size, dict(lacking), dict[int, Chunk]()
    spare_blocks = budget.available - sum(needs.values())
    for index, sequence in enumerate(decoding):
        num_new = num_blocks = needs.get(index, 0)
        count = 0
        if sequence.draft_token_ids and spare_tokens > 0:
            most_held = sequence.num_held_blocks + num_new + spare_blocks
            num_slots = most_held * size - sequence.num_computed - 1
            count = min(_wanted_drafts(budget, sequence, spare_tokens), num_slots)
            num_blocks = _blocks_needed(sequence, count, size)
            spare_blocks -= num_blocks - num_new
            spare_tokens -= count
        if num_blocks or count:
            more[index] = Chunk(1, num_blocks, count)
    return more


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
