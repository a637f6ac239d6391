"""What one step runs: a pure function of what is running, what waits, and the limits.

There is no prefill phase and no decode phase: every sequence is given tokens so that its computed
tokens catch up with its known ones. The order of one step is

1. decoding sequences, one token each, with the block that token may need;
2. running prefill chunks, by arrival;
3. admissions from the head of the queue, while seats, blocks and budget last.

A sequence is admitted with the blocks of all its known tokens, so a prefill never waits for blocks
half-way and two of them can never hold what the other needs. Only decoding sequences are preempted,
last in first out, and whoever was preempted gets its blocks before anyone new is admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.blocks import blocks_for
from engine.core.status import SequenceStatus


class SequenceView(Protocol):
    """What the planner reads of a sequence; it writes nothing."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def status(self) -> SequenceStatus: ...
    @property
    def has_remote_kv(self) -> bool: ...
    @property
    def num_known(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def block_table(self) -> Sequence[int]: ...


class PoolView(Protocol):
    """What the planner reads of the block pool."""

    @property
    def num_available(self) -> int: ...
    def is_evictable(self, block_id: int) -> bool: ...
    def num_unshared(self, block_ids: Sequence[int]) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The budgets of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the next `num_tokens` tokens of a sequence, after giving it `num_new_blocks`."""

    sequence_id: int
    num_tokens: int
    num_new_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """Seat a waiting sequence on cached blocks and `num_new_blocks` more.

    `num_tokens` is its first chunk; 0 for a sequence whose KV is computed elsewhere.
    """

    sequence_id: int
    cached_block_ids: tuple[int, ...]
    num_new_blocks: int
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """The decision of one step. Preemptions are applied first, then chunks, then admissions."""

    preempted: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(c.num_tokens for c in self.chunks) + sum(a.num_tokens for a in self.admissions)


MatchPrefix = Callable[[SequenceView], Sequence[int]]
"""Cached blocks with the start of a sequence's known tokens; never with its last token."""


def plan_step(
    *,
    running: Sequence[SequenceView],
    waiting: Sequence[SequenceView],
    num_seats_held: int,
    pool: PoolView,
    match_prefix: MatchPrefix,
    limits: Limits,
) -> StepPlan:
    """Plan one step. `running` and `waiting` are in order of arrival.

    `num_seats_held` counts sequences that hold a seat without running: those waiting for KV.
    """
    step = _Step(limits, pool)
    step.plan_decodes([s for s in running if s.status is SequenceStatus.RUNNING_DECODE])
    step.plan_chunks([s for s in running if s.status is SequenceStatus.RUNNING_PREFILL])
    if not step.plan.preempted:
        seats = limits.max_num_seqs - len(running) - num_seats_held
        step.plan_admissions(waiting, seats, match_prefix)
    assert step.plan.num_tokens <= limits.max_num_batched_tokens, "a step exceeds its token budget"
    assert step.available >= 0, "a step hands out blocks that it does not have"
    return step.plan


class _Step:
    """The budgets of one step while they are used up."""

    def __init__(self, limits: Limits, pool: PoolView) -> None:
        self.plan = StepPlan()
        self.limits = limits
        self.pool = pool
        self.tokens_left = limits.max_num_batched_tokens
        self.available = pool.num_available

    def plan_decodes(self, decoding: list[SequenceView]) -> None:
        """One token each, oldest first; the youngest pay when blocks run out."""
        last = len(decoding)
        index = 0
        while index < last:
            sequence = decoding[index]
            new_blocks = self._new_blocks(sequence, sequence.num_computed + 1)
            while new_blocks > self.available and last > index + 1:
                last -= 1
                self._preempt(decoding[last])
            if new_blocks <= self.available:
                self._add(sequence, 1, new_blocks)
            elif index > 0:
                self._preempt(sequence)
            # Else it is the only one decoding: it keeps its blocks and waits for the prefills and
            # transfers around it, whose blocks it may take once they decode or end.
            index += 1

    def plan_chunks(self, prefilling: list[SequenceView]) -> None:
        """Known tokens not computed yet, as far as the budget goes; blocks are held already."""
        for sequence in prefilling:
            num_tokens = min(sequence.num_known - sequence.num_computed, self.tokens_left)
            if num_tokens > 0:
                self._add(sequence, num_tokens, 0)

    def plan_admissions(
        self, waiting: Sequence[SequenceView], seats: int, match_prefix: MatchPrefix
    ) -> None:
        """The head of the queue first, in order of arrival, until one does not fit."""
        locked: set[int] = set()
        for sequence in waiting:
            if seats <= 0 or (self.tokens_left == 0 and not sequence.has_remote_kv):
                return
            cached = tuple(match_prefix(sequence))
            # A cached block that nobody references stops being evictable once it is shared.
            claimed = [b for b in cached if b not in locked and self.pool.is_evictable(b)]
            new_blocks = admission_blocks(sequence, self.limits.block_size) - len(cached)
            if new_blocks + len(claimed) > self.available:
                return
            locked.update(claimed)
            self.available -= new_blocks + len(claimed)
            seats -= 1
            num_tokens = 0
            if not sequence.has_remote_kv:
                num_cached = len(cached) * self.limits.block_size
                num_tokens = min(sequence.num_known - num_cached, self.tokens_left)
                self.tokens_left -= num_tokens
            self.plan.admissions.append(
                Admission(sequence.sequence_id, cached, new_blocks, num_tokens)
            )

    def _new_blocks(self, sequence: SequenceView, num_tokens: int) -> int:
        needed = blocks_for(num_tokens, self.limits.block_size)
        return max(needed - len(sequence.block_table), 0)

    def _add(self, sequence: SequenceView, num_tokens: int, new_blocks: int) -> None:
        self.plan.chunks.append(Chunk(sequence.sequence_id, num_tokens, new_blocks))
        self.tokens_left -= num_tokens
        self.available -= new_blocks

    def _preempt(self, victim: SequenceView) -> None:
        """Credit the victim with what it alone holds; shared blocks stay with the others."""
        self.plan.preempted.append(victim.sequence_id)
        self.available += self.pool.num_unshared(victim.block_table)


def admission_blocks(sequence: SequenceView, block_size: int) -> int:
    """Blocks a sequence needs to be seated: all its known tokens.

    One whose prompt is computed elsewhere also takes the block of its first decoded token: it
    starts decoding the moment its KV lands, without asking for anything again.
    """
    return blocks_for(sequence.num_known + (1 if sequence.has_remote_kv else 0), block_size)
