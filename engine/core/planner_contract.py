"""The planner's inputs, and the decision it returns. Values only, no logic."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from common.settings.scheduling_config import SchedulingConfig
from engine.core.policies.reservation import Reservation
from engine.core.policies.victims import VictimOrder
from engine.core.sequences.status import SequenceStatus


class SequenceView(Protocol):
    """The fields of a sequence that the planner reads; it never writes."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def arrival(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def status(self) -> SequenceStatus: ...
    @property
    def has_remote_kv(self) -> bool: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def num_known(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def num_held_blocks(self) -> int: ...
    @property
    def num_swapped(self) -> int: ...
    @property
    def num_bypassed(self) -> int: ...
    @property
    def num_output_since_resume(self) -> int | None: ...
    @property
    def draft_token_ids(self) -> Sequence[int]: ...
    @property
    def block_table(self) -> Sequence[int]: ...


class PoolView(Protocol):
    """The part of the block pool that the planner reads."""

    @property
    def num_available(self) -> int: ...
    def is_evictable(self, block_id: int) -> bool: ...
    def is_unshared(self, block_id: int) -> bool: ...


MatchPrefix = Callable[[SequenceView], Sequence[int]]
"""Returns cached blocks with the start of a sequence's known tokens, never with the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The budgets of one step. `num_speculative_tokens` is 0 when speculation is off.

    `pairs_per_token`: the attention of one token to so many others costs as much as its matrix
    products (`engine/core/planning/step_budget.py`); 0: attention is not counted.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_model_len: int
    num_speculative_tokens: int = 0
    chunk_granularity: int = 1
    pairs_per_token: int = 0

    @property
    def tokens_per_seq(self) -> int:
        """Most tokens a decoding sequence puts into one step."""
        return 1 + self.num_speculative_tokens


# One is made for each plan, and a frozen dataclass costs three times as much.
@dataclass(slots=True, kw_only=True)
class PlanPolicy:
    """The planner's choices. A bad one costs speed but breaks no budget."""

    reservation: Reservation
    victim_order: VictimOrder
    config: SchedulingConfig
    swaps_late: bool = False
    """Whether a preempted sequence's blocks are available only after a copy, beside the steps."""


class StopRule(StrEnum):
    """The rule that ended the admissions of a plan."""

    NOTHING_WAITS = "nothing_waits"
    NO_SEAT = "no_seat"
    NO_BUDGET = "no_budget"
    NO_BLOCKS = "no_blocks"
    RESERVED = "reserved"
    BARRIER = "barrier"
    PREEMPTED = "preempted"
    NO_VICTIM = "no_victim"
    COPYING = "copying"
    """The needed blocks become free when copies to host memory have ended."""
    FETCHING = "fetching"
    """The head's prefix is being copied back from host memory, or what it would evict there."""
    BEGUN = "begun"
    """The step had begun before the one before it ended, so no admission was tried."""


class AheadRule(StrEnum):
    """Whether a step was planned while the one before it ran, or what prevented that."""

    TAKEN = "taken"
    BEGUN = "begun"
    """The runner had begun the step already (`planning.going_on`)."""
    NO_STEP = "no_step"
    """No step was running, or steps are not planned ahead."""
    DRAFTS = "drafts"
    """Drafts were verified in the step, or are to be verified in the next one."""
    BLOCKS = "blocks"
    """A sequence would have to be preempted, or to wait for a block."""
    NOTHING_LEFT = "nothing_left"
    """Nothing could be planned, or all that was planned has ended."""
    FAILED = "failed"
    """The step failed, at least for some sequences."""
    NEW_WORK = "new_work"
    """A request arrived, or KV has landed."""
    PREFIX = "prefix"
    """The step made tokens findable that an admitted prompt begins with, or they were found in
    host memory, or what a prompt evicts was still to be copied there."""


class PreemptionReason(StrEnum):
    """Why a sequence lost its blocks."""

    BLOCKS = "blocks"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `num_tokens` known tokens and `num_drafts` drafts, after adding `num_new_blocks`."""

    num_tokens: int
    num_new_blocks: int = 0
    num_drafts: int = 0


PLAIN_DECODE = Chunk(1)
"""The chunk of nearly every decode: one object for all, so that others are found by identity."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Seat a waiting sequence on cached blocks and `num_new_blocks` more.

    `num_tokens` is its first chunk; 0 for a sequence whose KV is computed elsewhere.
    """

    sequence_id: int
    cached_block_ids: tuple[int, ...]
    num_new_blocks: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """Take a decoding sequence's blocks."""

    sequence_id: int
    reason: PreemptionReason


@dataclass(slots=True)
class StepPlan:
    """The decision of one step. Preemptions are applied first, then chunks, then admissions.

    `chunks` are by sequence id: decodes first, then prefill chunks. `starved` sequences can never
    get the block they need and must be finished. `bypassed` are blocked sequences, each with those
    that are admitted before it. `stopped_by` is the rule that ended the admissions.
    """

    preempted: list[Preemption] = field(default_factory=list)
    chunks: dict[int, Chunk] = field(default_factory=dict)
    admissions: list[Admission] = field(default_factory=list)
    starved: list[int] = field(default_factory=list)
    bypassed: dict[int, list[int]] = field(default_factory=dict)
    stopped_by: StopRule = StopRule.NOTHING_WAITS
    num_decode_tokens: int = 0
    num_draft_tokens: int = 0
    num_chunk_tokens: int = 0
    num_growth_blocks: int = 0
    """Blocks that the reservation policy kept back in this plan (0: no admission was tried)."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_decode_tokens + self.num_draft_tokens + self.num_chunk_tokens

    def without(self, sequence_ids: Set[int]) -> StepPlan:
        """Return the plan without the chunks and admissions of these sequences.

        What they would have taken is not given to others, and nobody counts as passed by them.
        """
        num_decodes = self.num_decode_tokens
        kept = {i: chunk for i, chunk in self.chunks.items() if i not in sequence_ids}
        lost = [n for n, i in enumerate(self.chunks) if i in sequence_ids]
        admissions = [one for one in self.admissions if one.sequence_id not in sequence_ids]
        chunks = list(self.chunks.values())
        return replace(
            self,
            chunks=kept,
            admissions=admissions,
            bypassed={
                blocked: [one for one in admitted if one not in sequence_ids]
                for blocked, admitted in self.bypassed.items()
            },
            num_decode_tokens=num_decodes - sum(n < num_decodes for n in lost),
            num_draft_tokens=sum(chunk.num_drafts for chunk in kept.values()),
            num_chunk_tokens=self.num_chunk_tokens
            - sum(chunks[n].num_tokens for n in lost if n >= num_decodes)
            - sum(one.num_tokens for one in self.admissions)
            + sum(one.num_tokens for one in admissions),
        )
