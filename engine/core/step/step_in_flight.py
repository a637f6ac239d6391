"""A step between the scheduler and its callers: what to compute, and what is sent of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from engine.core.blocks.block_pool import BlockCounts
from engine.core.blocks.cache_copy import PrefixCopy
from engine.core.planner_contract import StopRule
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_batch import EMPTY_BATCH, StepBatch

E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy whole blocks between the cache and host memory, pairwise."""

    block_ids: list[int]
    host_block_ids: list[int]


@dataclass(slots=True, eq=False)
class SwapCopy:
    """Copy whole blocks of a sequence to host memory (`is_out`) or back, beside the steps."""

    sequence: Sequence
    block_ids: list[int]
    host_block_ids: list[int]
    is_out: bool
    held_host_block_ids: list[int] = field(default_factory=list)
    """Host blocks to be released when the copy has ended."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """The preemptions of one step: for blocks and for more urgent requests, and what they changed.

    `num_lost_tokens` had been computed and are computed again, unless they are in the prefix cache
    or in host memory when their sequence resumes. `blocks` is the pool after the step was planned.
    """

    num_for_blocks: int
    num_for_priority: int
    num_lost_tokens: int
    ratio_before: float
    ratio_after: float
    blocks: BlockCounts
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class PlannedStep:
    """The input of the runner, in this order: `swap_outs`, `swap_ins`, `batch`.

    `swap_copies` begin before `batch`, in this order, and `Scheduler.end_copy` takes their ends.
    `sequences` are those of the batch. The transfers of `reserved` may begin. `starved` sequences
    can never get the block they need and must be finished.
    """

    batch: StepBatch = EMPTY_BATCH
    sequences: list[Sequence] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    starved: list[Sequence] = field(default_factory=list)
    swap_outs: list[BlockCopy] = field(default_factory=list)
    swap_ins: list[BlockCopy] = field(default_factory=list)
    swap_copies: list[SwapCopy | PrefixCopy] = field(default_factory=list)
    num_preempted: int = 0
    num_tokens: int = 0
    num_lost_tokens: int = 0
    preempted: Preempted | None = None
    """What the step's preemptions changed; None if there were none."""
    took_s: float = 0.0
    """Seconds that the runner took; 0 if they are not known, or the step failed in part.

    Of a step that was begun after another one it is the time from the end of that one on.
    """
    stopped_by: StopRule = StopRule.NOTHING_WAITS
    """The rule that ended the admissions."""

    @property
    def made_progress(self) -> bool:
        """Whether the next plan may differ from this one without a new event."""
        begun = self.reserved or self.swap_copies or self.swap_outs
        return bool(self.sequences or begun or self.num_preempted or self.starved)

    @property
    def has_drafts(self) -> bool:
        """Whether it verifies drafts, or lets the runner propose some to a sequence that stays."""
        if self.batch.num_drafts.any():
            return True
        proposing = self.batch.num_proposals.nonzero()[0]
        return any(not self.sequences[entry].is_exported for entry in proposing)

    def set_proposals(self, numbers: Callable[[Items[Sequence]], Items[int]]) -> None:
        """Set how many drafts a drafter inside the runner may add to each drawn token."""
        drawing = self.batch.is_sampled.nonzero()[0]
        sequences = [self.sequences[entry] for entry in drawing]
        proposals = np.zeros(len(self.batch), np.int64)
        proposals[drawing] = numbers(sequences)
        self.batch.num_proposals = proposals

    def only(self, entries: Items[int]) -> PlannedStep:
        """Return the part of the step that computed these indices of the batch."""
        return PlannedStep(self.batch.only(entries), [self.sequences[entry] for entry in entries])


@dataclass(frozen=True, slots=True)
class Pushes(Generic[E_co]):
    """Effects that send what a step computes: `before` the step, and `of_layer(l)` after layer l.

    `of_layer` is called during the step, once for each layer; None if no layer is pushed.
    """

    before: Items[E_co]
    of_layer: Callable[[int], Items[E_co]] | None
