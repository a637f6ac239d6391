"""Hand-made sequences and pools for the planner, and `plan`, which calls it with few arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.kv.blocks import blocks_for
from common.settings.scheduling_config import SchedulingConfig
from engine.core.planner_contract import PlanPolicy, StepLimits, StepPlan
from engine.core.planning.planner import plan_step
from engine.core.policies.growth import GrowthColumns, GrowthView
from engine.core.policies.reservation import NoReservation, Reservation
from engine.core.policies.victims import VICTIM_ORDERS
from engine.core.sequences.status import SequenceStatus

BS = 64
MANY = 1 << 20
"""More tokens than any example has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A sequence as the planner sees it. By default its arrival is its id."""

    sequence_id: int
    status: SequenceStatus
    num_known: int
    num_computed: int = 0
    block_table: tuple[int, ...] = ()
    num_output: int = 0
    max_new_tokens: int = MANY
    priority: int = 0
    has_remote_kv: bool = False
    num_swapped: int = 0
    num_bypassed: int = 0
    num_output_since_resume: int | None = None
    draft_token_ids: tuple[int, ...] = ()

    @property
    def arrival(self) -> int:
        return self.sequence_id

    @property
    def num_prompt(self) -> int:
        return self.num_known - self.num_output

    @property
    def num_held_blocks(self) -> int:
        return len(self.block_table)


@dataclass(frozen=True, slots=True)
class Pool:
    """`num_available` blocks; some ids evictable, some shared between sequences."""

    num_available: int
    evictable: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self.evictable

    def is_unshared(self, block_id: int) -> bool:
        return block_id not in self.shared


def decoding(
    sequence_id: int,
    computed: int,
    blocks: int | tuple[int, ...] | None = None,
    *,
    drafts: int = 0,
    output: int = 1,
    most: int = MANY,
    priority: int = 0,
    since_resume: int | None = None,
) -> View:
    """A sequence that decodes token `computed`; by default its blocks hold the computed ones.

    `most` is its `max_new_tokens`, `since_resume` its output since it was preempted.
    """
    if blocks is None:
        blocks = blocks_for(computed, BS)
    return View(
        sequence_id=sequence_id,
        status=SequenceStatus.RUNNING_DECODE,
        num_known=computed + 1,
        num_computed=computed,
        block_table=blocks if isinstance(blocks, tuple) else block_ids(sequence_id, blocks),
        num_output=output,
        max_new_tokens=most,
        priority=priority,
        num_output_since_resume=since_resume,
        draft_token_ids=(7,) * drafts,
    )


def prefilling(
    sequence_id: int, known: int, computed: int, *, most: int = MANY, priority: int = 0
) -> View:
    """A prompt of which `computed` tokens are done; it holds the blocks of all of it."""
    return View(
        sequence_id=sequence_id,
        status=SequenceStatus.RUNNING_PREFILL,
        num_known=known,
        num_computed=computed,
        block_table=block_ids(sequence_id, blocks_for(known, BS)),
        max_new_tokens=most,
        priority=priority,
    )


def receiving(sequence_id: int, known: int, blocks: int, *, most: int = MANY) -> View:
    """A prompt whose KV is on its way into `blocks` blocks."""
    return View(
        sequence_id=sequence_id,
        status=SequenceStatus.WAITING_FOR_KV,
        num_known=known,
        block_table=block_ids(sequence_id, blocks),
        max_new_tokens=most,
        has_remote_kv=True,
    )


def waiting(
    sequence_id: int,
    known: int,
    *,
    remote: bool = False,
    most: int = MANY,
    priority: int = 0,
    bypassed: int = 0,
) -> View:
    """A new sequence in the queue."""
    return View(
        sequence_id=sequence_id,
        status=SequenceStatus.WAITING,
        num_known=known,
        max_new_tokens=most,
        has_remote_kv=remote,
        priority=priority,
        num_bypassed=bypassed,
    )


def preempted(
    sequence_id: int,
    known: int,
    *,
    output: int = 1,
    most: int = MANY,
    priority: int = 0,
    swapped: int = 0,
) -> View:
    """A victim in the queue; `swapped` of its tokens have their KV in host memory."""
    return View(
        sequence_id=sequence_id,
        status=SequenceStatus.PREEMPTED,
        num_known=known,
        num_output=output,
        max_new_tokens=most,
        priority=priority,
        num_swapped=swapped,
        num_output_since_resume=0,
    )


def block_ids(sequence_id: int, count: int) -> tuple[int, ...]:
    """Ids that no other sequence has."""
    return tuple(range(1000 * sequence_id, 1000 * sequence_id + count))


def lacking_blocks(view: View) -> int:
    """Return how many blocks a view lacks for its next token."""
    return max(blocks_for(view.num_computed + 1, BS) - view.num_held_blocks, 0)


def growth_columns(views: Sequence[GrowthView]) -> GrowthColumns:
    """Return the columns of these views."""

    def column(name: str) -> npt.NDArray[np.int64]:
        return np.array([getattr(view, name) for view in views], np.int64)

    return GrowthColumns(
        num_known=column("num_known"),
        num_output=column("num_output"),
        max_new_tokens=column("max_new_tokens"),
        num_held_blocks=column("num_held_blocks"),
    )


def plan(
    *,
    running: Sequence[View] = (),
    landing: Sequence[View] = (),
    queue: Sequence[View] = (),
    exporting: int = 0,
    pool: Pool | int = 100_000,
    cached: Mapping[int, tuple[int, ...]] | None = None,
    cap: int = 8192,
    seats: int = 1024,
    k: int = 0,
    granularity: int = 1,
    model_len: int = MANY,
    reservation: Reservation | None = None,
    order: str = "last_in_first_out",
    retract: int = 0,
    progress: int = 0,
    window: int = 0,
    limit: int = 16,
    priorities: bool = False,
    threshold: int = 0,
    pairs: int = 0,
) -> StepPlan:
    """Plan one step. By default without reservation, headroom and skip-ahead."""
    found = cached or {}
    return plan_step(
        running=running,
        lacking=[(i, num) for i, num in enumerate(map(lacking_blocks, running)) if num],
        receiving=landing,
        waiting=queue,
        num_exporting=exporting,
        growth=lambda: growth_columns([*running, *landing]),
        pool=Pool(pool) if isinstance(pool, int) else pool,
        match_prefix=lambda view: found.get(view.sequence_id, ()),
        limits=StepLimits(
            max_num_seqs=seats,
            max_num_batched_tokens=cap,
            block_size=BS,
            max_model_len=model_len,
            num_speculative_tokens=k,
            chunk_granularity=granularity,
            pairs_per_token=pairs,
        ),
        policy=PlanPolicy(
            reservation=reservation or NoReservation(),
            victim_order=VICTIM_ORDERS[order],
            config=SchedulingConfig(
                retract_decode_steps=retract,
                min_progress_tokens=progress,
                skip_ahead_window=window,
                skip_ahead_limit=limit,
                enable_priority_scheduling=priorities,
                long_prefill_token_threshold=threshold,
            ),
        ),
    )


def admitted(step: StepPlan) -> list[int]:
    """Return the admitted sequences."""
    return [admission.sequence_id for admission in step.admissions]


def victims(step: StepPlan) -> list[int]:
    """Return the preempted sequences, in order."""
    return [preemption.sequence_id for preemption in step.preempted]


def tokens(step: StepPlan) -> dict[int, int]:
    """Tokens of each planned sequence, drafts included, in the order of the plan."""
    planned = {i: c.num_tokens + c.num_drafts for i, c in step.chunks.items()}
    return planned | {a.sequence_id: a.num_tokens for a in step.admissions if a.num_tokens}
