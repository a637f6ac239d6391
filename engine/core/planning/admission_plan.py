"""Admissions of one step: order of the queue, blocks kept back for running sequences, skip-ahead.

A sequence is admitted with the blocks of all its known tokens. So a prefill never waits for blocks
half-way, and two prefills cannot deadlock on each other's blocks. The reservation policy also keeps
back blocks that running sequences are expected to need, unless nothing runs. When the head of the
queue does not fit, a few sequences behind it may be admitted first, a bounded number of times, but
none before a preempted one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass

from common.kv.blocks import blocks_for
from engine.core.planner_contract import (
    Admission,
    MatchPrefix,
    PreemptionReason,
    SequenceView,
    StepLimits,
    StopRule,
)
from engine.core.planning.step_budget import StepBudget
from engine.core.policies.growth import GrowthColumns, GrowthView, SeatedView
from engine.core.policies.reserve import Reserve
from engine.core.policies.victims import headroom_blocks, is_recently_resumed
from engine.core.sequences.status import SequenceStatus

_DECODING = (SequenceStatus.RUNNING_DECODE, SequenceStatus.SWAPPING_IN)


def plan_admissions(
    budget: StepBudget,
    waiting: Collection[SequenceView],
    *,
    seated: Sequence[SequenceView],
    growth: Callable[[], GrowthColumns],
    match_prefix: MatchPrefix,
    awaiting: Set[int],
) -> None:
    """Plan admissions from the head of the queue.

    `seated`: all sequences that run or wait for KV. `growth` returns what a reservation reads of
    them, as it was before this step. Those of `awaiting`, by id, stay where they are.
    """
    if not waiting:
        return
    if budget.num_seats <= 0 and not budget.policy.config.enable_priority_scheduling:
        budget.plan.stopped_by = StopRule.NO_SEAT
        return
    _Admissions(budget, seated, growth, match_prefix, awaiting).run(waiting)


def admission_blocks(sequence: SequenceView, limits: StepLimits) -> int:
    """Return how many blocks a sequence needs to be seated: those of its known tokens.

    A sequence whose prompt is computed elsewhere also takes the slots of its first step, drafts
    included: it decodes as soon as its KV has landed, without another allocation.
    """
    if sequence.has_remote_kv:
        return _first_step_blocks(sequence, limits)
    return blocks_for(sequence.num_known, limits.block_size)


def _first_step_blocks(sequence: SequenceView, limits: StepLimits) -> int:
    """Return the number of blocks for all known tokens and one decode step.

    No slots are counted beyond the longest possible output.
    """
    most = min(sequence.num_known + limits.tokens_per_seq, limits.max_model_len)
    longest = sequence.num_prompt + sequence.max_new_tokens
    return blocks_for(max(min(most, longest), sequence.num_known), limits.block_size)


# Not frozen, because one is made for each candidate of each step.
@dataclass(slots=True)
class _Need:
    """Blocks of a candidate: `num_new` to allocate, and `claimed`, the evictable of `cached`."""

    cached: tuple[int, ...]
    claimed: list[int]
    num_new: int
    seated: SeatedView
    num_now: int
    """Blocks that must be available now, without the reservation."""


@dataclass(frozen=True, slots=True)
class _Room:
    """What a candidate finds when `victims` are preempted: the reserve of the others, `freed`."""

    victims: Sequence[SequenceView]
    need: _Need
    reserve: Reserve
    freed: set[int]


# The walk along the queue, in four questions for each candidate.
#
#     1. what does it need?    blocks of all known tokens, less its cached prefix; sharing an
#                              evictable block uses it up like a new one (`_need`)
#     2. what must stay?       the reserve: growth of all that is seated, the candidate included;
#                              nothing when nobody is seated (`_why_blocked`)
#     3. may others go?        only for the head, and only decodes of lower priority
#                              (`_preempt_lower`): a plan with the least loss, or none at all
#     4. who may pass?         up to `skip_ahead_window` candidates behind a blocked one, until
#                              one of the blocked ones is a barrier (`_is_barrier`)
#
# Lack of a seat, of tokens, or of blocks that a copy is about to free ends the walk at once, for
# everyone: what is left belongs to the head. Lack of blocks or of the reserve, or a prefix that is
# being copied, only blocks the candidate. `plan.stopped_by` names the rule that stopped the first
# blocked one, or the barrier.
#
# The state of the walk is what it has promised already: `seated` and `reserve` with the candidates
# seated so far, `locked` cached blocks, `freed` blocks of victims. Each of them is needed because
# the pool itself does not change while a plan is made. `_room_without` is the same check on a
# hypothetical state; it must agree with `_try_to_seat`, or victims would be preempted in vain.
class _Admissions:
    """One walk along the queue."""

    def __init__(
        self,
        budget: StepBudget,
        seated: Sequence[SequenceView],
        growth: Callable[[], GrowthColumns],
        match_prefix: MatchPrefix,
        awaiting: Set[int],
    ) -> None:
        self.budget = budget
        self.awaiting = awaiting
        self.match_prefix = match_prefix
        self.seated = list(seated)
        self.locked: set[int] = set()
        """Cached blocks that this walk shares: preempting a victim does not free them."""
        self.freed: set[int] = set()
        """Blocks that this walk's victims give back: available, but not evictable yet."""
        self.reserve = budget.policy.reservation.reserve(growth())
        for sequence, num_new_blocks in budget.growing:
            self.reserve = self.reserve.grown(sequence, num_new_blocks)

    def run(self, waiting: Iterable[SequenceView]) -> None:
        plan, policy = self.budget.plan, self.budget.policy
        blocked: list[SequenceView] = []
        rule = StopRule.NOTHING_WAITS
        num_behind = 0
        for sequence in waiting:
            if blocked:
                num_behind += 1
                if num_behind > policy.config.skip_ahead_window:
                    break
            stop = self._try_to_seat(sequence, is_head=not blocked)
            if stop is None:
                for one in blocked:
                    plan.bypassed.setdefault(one.sequence_id, []).append(sequence.sequence_id)
            elif stop in (StopRule.NO_SEAT, StopRule.NO_BUDGET, StopRule.COPYING):
                rule = rule if blocked else stop
                break
            else:
                rule = rule if blocked else stop
                blocked.append(sequence)
            # One that was blocked before becomes a barrier only by an admission.
            if any(map(self._is_barrier, blocked if stop is None else blocked[-1:])):
                rule = StopRule.BARRIER
                break
        plan.stopped_by = rule
        plan.num_growth_blocks = self.reserve.blocks

    def _as_planned(self, sequence: SequenceView) -> GrowthView:
        """Return `sequence` as it will be after this step's allocation."""
        planned = self.budget.plan.chunks.get(sequence.sequence_id)
        if planned is None or planned.num_new_blocks == 0:
            return sequence
        return SeatedView(
            sequence.num_known,
            sequence.num_output,
            sequence.max_new_tokens,
            sequence.num_held_blocks + planned.num_new_blocks,
        )

    def _is_barrier(self, sequence: SequenceView) -> bool:
        """Return whether no one may pass: it was preempted, or passed often enough.

        A preempted sequence has a reader already, and work to lose: newcomers that take its blocks
        would make it wait longer and be preempted in turn.
        """
        if sequence.status is SequenceStatus.PREEMPTED:
            return True
        passing = self.budget.plan.bypassed.get(sequence.sequence_id, ())
        limit = self.budget.policy.config.skip_ahead_limit
        return sequence.num_bypassed + len(passing) >= limit

    def _try_to_seat(self, sequence: SequenceView, *, is_head: bool) -> StopRule | None:
        """Plan an admission; return the rule that prevents it, or None."""
        if sequence.sequence_id in self.awaiting:
            return StopRule.FETCHING
        budget = self.budget
        need = self._need(sequence, self.freed)
        may_preempt = is_head and budget.policy.config.enable_priority_scheduling
        is_room_made = False
        if may_preempt and (budget.num_seats <= 0 or self._why_blocked(need, sequence)):
            is_room_made, need = self._preempt_lower(sequence, need)
        start, num_tokens = self._first_chunk(sequence, need)
        if num_tokens == 0 and not self._is_copied_in(sequence, need):
            return StopRule.NO_BUDGET
        if budget.num_seats <= 0:
            return StopRule.NO_SEAT
        stop = self._why_blocked(need, sequence)
        if stop is not None:
            # Nobody may take what is left of the room: it is enough only with what is coming.
            return StopRule.COPYING if is_room_made else stop
        self.locked.update(need.cached)
        self.reserve = self.reserve.plus(need.seated)
        self.seated.append(sequence)
        admission = Admission(sequence.sequence_id, need.cached, need.num_new, num_tokens)
        budget.plan_admission(admission, start, len(need.claimed))
        return None

    def _need(self, sequence: SequenceView, freed: Set[int]) -> _Need:
        """Return what `sequence` needs; this plan's preemptions make `freed` evictable."""
        limits, pool = self.budget.limits, self.budget.pool
        cached = tuple(self.match_prefix(sequence))
        # An evictable block that is shared stops being evictable, so it counts as taken.
        claimed = [
            b for b in cached if b not in self.locked and (pool.is_evictable(b) or b in freed)
        ]
        num_blocks = admission_blocks(sequence, limits)
        num_new = num_blocks - len(cached)
        view = SeatedView(
            sequence.num_known, sequence.num_output, sequence.max_new_tokens, num_blocks
        )
        return _Need(
            cached,
            claimed,
            num_new,
            view,
            _first_step_blocks(sequence, limits) - len(cached) + len(claimed),
        )

    def _why_blocked(self, need: _Need, sequence: SequenceView) -> StopRule | None:
        """Return the rule by which blocks are missing, or None.

        The reservation is waived when no sequence is seated.
        """
        available = self.budget.available
        if need.num_now > available:
            return StopRule.NO_BLOCKS
        if not self.seated:
            return None
        reserved = self.reserve.blocks_with(need.seated)
        if sequence.status is SequenceStatus.PREEMPTED:
            reserved = max(reserved, self._headroom(sequence, self.seated))
        if need.num_new + len(need.claimed) + reserved > available:
            return StopRule.RESERVED
        return None

    def _headroom(self, sequence: SequenceView, seated: Iterable[SequenceView]) -> int:
        """Return the blocks to leave free when a victim is seated, or it is preempted again."""
        decoding = [s for s in seated if s.status in _DECODING]
        return headroom_blocks(
            [*decoding, sequence],
            retract_decode_steps=self.budget.policy.config.retract_decode_steps,
            tokens_per_seq=self.budget.limits.tokens_per_seq,
            block_size=self.budget.limits.block_size,
        )

    def _first_chunk(
        self, sequence: SequenceView, need: _Need, num_freed_tokens: int = 0
    ) -> tuple[int, int]:
        """Return the start and the tokens of the first chunk; victims leave `num_freed_tokens`."""
        if self._is_copied_in(sequence, need):
            return 0, 0
        start = max(len(need.cached) * self.budget.limits.block_size, sequence.num_swapped)
        num_uncomputed = sequence.num_known - start
        return start, self.budget.chunk_tokens(start, num_uncomputed, num_kept=-num_freed_tokens)

    def _is_copied_in(self, sequence: SequenceView, need: _Need) -> bool:
        """Return whether its KV is copied to its blocks beside the steps, before it decodes."""
        if sequence.has_remote_kv:
            return True
        num_cached = len(need.cached) * self.budget.limits.block_size
        return self.budget.policy.swaps_late and sequence.num_swapped > num_cached

    def _preempt_lower(self, sequence: SequenceView, need: _Need) -> tuple[bool, _Need]:
        """Preempt lower priorities if that makes `sequence` fit; else preempt none.

        Return whether there is room now, or when copies have ended, and what it then needs.
        """
        room = None
        if self.budget.coming and self.budget.num_seats > 0:
            room = self._room_without(sequence, ())
        room = room or self._room_by_fewest_victims(sequence)
        if room is None:
            return False, need
        for victim in room.victims:
            num_freed = len(self._blocks_of_its_own(victim))
            self.seated.remove(victim)
            self.budget.preempt(victim, PreemptionReason.PRIORITY, num_freed)
        self.reserve = room.reserve
        if self.budget.policy.swaps_late:
            return True, self._need(sequence, self.freed)
        self.freed = room.freed
        return True, room.need

    def _room_by_fewest_victims(self, sequence: SequenceView) -> _Room | None:
        """Return the room that `sequence` needs, at the least loss; None if there is none.

        Any decode of a lower priority may go, the lowest priority first, among equals the one with
        the fewest computed tokens. A victim that turns out not to be needed stays. A sequence that
        resumed and has not made progress yet stays too, so that each resumption is worth its cost.
        """
        least = self.budget.policy.config.min_progress_tokens
        lower = [
            s
            for s in self.seated
            if s.status is SequenceStatus.RUNNING_DECODE
            and s.priority < sequence.priority
            and not is_recently_resumed(s, least)
        ]
        lower.sort(key=lambda s: (s.priority, s.num_computed, -s.arrival, s.sequence_id))
        best = self._room_without(sequence, lower) if lower else None
        if best is None:
            return None
        # More victims never make less room: the fewest in this order are found by halving.
        too_few, enough = 0, len(lower)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            room = self._room_without(sequence, lower[:middle])
            if room is None:
                too_few = middle
            else:
                enough, best = middle, room
        for victim in reversed(best.victims):
            others = [one for one in best.victims if one is not victim]
            room = self._room_without(sequence, others) if others else None
            best = room or best
        return best

    def _room_without(
        self, sequence: SequenceView, victims: Sequence[SequenceView]
    ) -> _Room | None:
        """Return the room for `sequence` when `victims` are preempted; None if it is too small.

        A victim counts with the blocks that it alone holds, not with what it might still need.
        """
        budget, reserve = self.budget, self.reserve
        available, num_freed_tokens = budget.available + budget.coming, 0
        freed = set(self.freed)
        for victim in victims:
            unshared = self._blocks_of_its_own(victim)
            planned = budget.plan.chunks.get(victim.sequence_id)
            available += len(unshared)
            if planned is not None:
                available += planned.num_new_blocks
                num_freed_tokens += planned.num_tokens + planned.num_drafts
            freed |= unshared
            reserve = reserve.minus(self._as_planned(victim))
        need = self._need(sequence, freed)
        _, num_tokens = self._first_chunk(sequence, need, num_freed_tokens)
        if num_tokens == 0 and not self._is_copied_in(sequence, need):
            return None
        reserved = 0
        if len(victims) < len(self.seated):
            reserved = reserve.blocks_with(need.seated)
            if sequence.status is SequenceStatus.PREEMPTED:
                gone = {victim.sequence_id for victim in victims}
                left = [s for s in self.seated if s.sequence_id not in gone]
                reserved = max(reserved, self._headroom(sequence, left))
        if max(need.num_new + len(need.claimed) + reserved, need.num_now) > available:
            return None
        return _Room(victims, need, reserve, freed)

    def _blocks_of_its_own(self, victim: SequenceView) -> set[int]:
        pool = self.budget.pool
        return {b for b in victim.block_table if pool.is_unshared(b) and b not in self.locked}
