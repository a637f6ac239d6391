"""What one step runs, for hand-made views of sequences and pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from engine.core.planner import Admission, Chunk, Limits, StepPlan, admission_blocks, plan_step
from engine.core.status import SequenceStatus

BS = 64


@dataclass(frozen=True)
class View:
    """A sequence as the planner sees it; `blocks` are its block ids."""

    sequence_id: int
    status: SequenceStatus
    num_known: int
    num_computed: int
    block_table: tuple[int, ...] = ()
    has_remote_kv: bool = False


@dataclass(frozen=True)
class Pool:
    """`num_available` blocks; some ids evictable, some shared between sequences."""

    num_available: int
    evictable: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self.evictable

    def num_unshared(self, block_ids: Sequence[int]) -> int:
        return sum(block_id not in self.shared for block_id in block_ids)


def decoding(sequence_id: int, computed: int, blocks: int | tuple[int, ...] | None = None) -> View:
    """A sequence that decodes token `computed`; by default its blocks hold the computed ones."""
    if blocks is None:
        blocks = -(-computed // BS)
    table = (
        blocks
        if isinstance(blocks, tuple)
        else tuple(range(1000 * sequence_id, 1000 * sequence_id + blocks))
    )
    return View(sequence_id, SequenceStatus.RUNNING_DECODE, computed + 1, computed, table)


def prefilling(sequence_id: int, known: int, computed: int) -> View:
    table = tuple(range(1000 * sequence_id, 1000 * sequence_id + -(-known // BS)))
    return View(sequence_id, SequenceStatus.RUNNING_PREFILL, known, computed, table)


def waiting(sequence_id: int, known: int, *, remote: bool = False) -> View:
    return View(sequence_id, SequenceStatus.WAITING, known, 0, (), remote)


def plan(
    *,
    running: Sequence[View] = (),
    queue: Sequence[View] = (),
    held: int = 0,
    pool: Pool | int = 1000,
    cap: int = 8192,
    seats: int = 256,
    cached: Mapping[int, tuple[int, ...]] | None = None,
) -> StepPlan:
    found = cached or {}
    return plan_step(
        running=running,
        waiting=queue,
        num_seats_held=held,
        pool=Pool(pool) if isinstance(pool, int) else pool,
        match_prefix=lambda view: found.get(view.sequence_id, ()),
        limits=Limits(max_num_seqs=seats, max_num_batched_tokens=cap, block_size=BS),
    )


def decodes(count: int) -> list[View]:
    return [decoding(i, 32, 1) for i in range(1, count + 1)]


# --- the token budget -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "seats", "num_decodes", "left"),
    [
        (8192, 256, 100, 8092),  # E01
        (8192, 256, 0, 8192),  # E05, without speculation
        (512, 512, 256, 256),
        (257, 257, 256, 1),
    ],
)
def test_decodes_are_charged_one_token_each_and_a_prompt_gets_what_is_left(
    cap: int, seats: int, num_decodes: int, left: int
) -> None:
    step = plan(running=decodes(num_decodes), queue=[waiting(999, 20_000)], cap=cap, seats=seats)
    assert step.num_tokens == cap
    assert [c.num_tokens for c in step.chunks] == [1] * num_decodes
    assert [a.num_tokens for a in step.admissions] == [left]


def test_a_budget_used_up_by_decodes_still_plans_all_of_them_and_no_more() -> None:
    # E07: the decodes get their tokens and blocks, nobody else does.
    running = [decoding(i, 64) for i in range(1, 257)]
    step = plan(running=running, queue=[waiting(999, 10)], cap=256, seats=300)
    assert step.num_tokens == 256
    assert all(chunk == Chunk(i, 1, 1) for i, chunk in enumerate(step.chunks, 1))
    assert step.admissions == []


def test_decodes_come_before_running_chunks_before_admissions() -> None:
    # E11 with one token per decode.
    running = [prefilling(1, 4000, 0), decoding(2, 70), decoding(3, 70)]
    step = plan(running=running, queue=[waiting(4, 10)], cap=1024)
    assert step.chunks == [Chunk(2, 1), Chunk(3, 1), Chunk(1, 1022)]
    assert step.admissions == []
    assert step.num_tokens == 1024


def test_chunks_share_what_the_budget_leaves_in_order_of_arrival() -> None:
    running = [prefilling(1, 100, 40), prefilling(2, 100, 0), prefilling(3, 100, 0)]
    step = plan(running=running, queue=[waiting(4, 100)], cap=130)
    assert [(c.sequence_id, c.num_tokens) for c in step.chunks] == [(1, 60), (2, 70)]
    assert step.admissions == []


def test_admissions_use_the_budget_up_and_the_last_takes_a_part() -> None:
    queue = [waiting(1, 100), waiting(2, 100), waiting(3, 100), waiting(4, 100)]
    step = plan(queue=queue, cap=250)
    assert step.admissions == [
        Admission(1, (), 2, 100),
        Admission(2, (), 2, 100),
        Admission(3, (), 2, 50),
    ]


def test_an_admission_computes_only_what_the_cache_lacks() -> None:
    # E75, E76 and E77 with their hits given: 31 blocks, 64 tokens and 32 tokens.
    cached = {1: tuple(range(32)), 2: tuple(range(100, 163)), 3: tuple(range(200, 262))}
    queue = [waiting(1, 4000), waiting(2, 4096), waiting(3, 4000)]
    step = plan(queue=queue, cap=8192, cached=cached)
    assert [(a.num_new_blocks, a.num_tokens) for a in step.admissions] == [
        (31, 1952),
        (1, 64),
        (1, 32),
    ]


# --- seats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_running", "held", "admitted"), [(0, 0, 3), (2, 0, 1), (1, 1, 1), (0, 3, 0), (2, 1, 0)]
)
def test_seats_are_held_by_who_runs_and_who_waits_for_kv(
    num_running: int, held: int, admitted: int
) -> None:
    queue = [waiting(i, 10) for i in (11, 12, 13, 14)]
    step = plan(running=decodes(num_running), queue=queue, held=held, seats=3)
    assert [a.sequence_id for a in step.admissions] == [11, 12, 13][:admitted]


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("computed", "table", "new"),
    [
        (100, 2, 0),  # E26
        (4000, 65, 0),  # E27
        (127, 2, 0),
        (128, 2, 1),
        (0, 1, 0),
    ],
)
def test_a_decode_takes_a_block_only_when_its_next_token_starts_one(
    computed: int, table: int, new: int
) -> None:
    assert plan(running=[decoding(1, computed, table)]).chunks == [Chunk(1, 1, new)]


@pytest.mark.parametrize(
    ("known", "is_remote", "blocks"),
    [
        (100, False, 2),  # E25
        (1, False, 1),
        (63, False, 1),
        (64, False, 1),
        (65, False, 2),
        (4000, True, 63),  # E70
        (4032, True, 64),  # E71
        (63, True, 1),  # E72
        (64, True, 2),  # E73
        (10, True, 1),  # E74
        (1, True, 1),
    ],
)
def test_a_sequence_is_seated_with_the_blocks_of_all_it_knows(
    known: int, is_remote: bool, blocks: int
) -> None:
    sequence = waiting(1, known, remote=is_remote)
    assert admission_blocks(sequence, BS) == blocks
    (admission,) = plan(queue=[sequence], pool=blocks).admissions
    assert admission.num_new_blocks == blocks
    assert plan(queue=[sequence], pool=blocks - 1).admissions == []


def test_the_blocks_of_a_long_prompt_are_taken_once_for_all_its_chunks() -> None:
    # E28 without speculation: what was seated asks for nothing again.
    (admission,) = plan(queue=[waiting(1, 64)], cap=16).admissions
    assert admission == Admission(1, (), 1, 16)
    for computed in (16, 32, 48):
        assert plan(running=[prefilling(1, 64, computed)], cap=16).chunks == [Chunk(1, 16, 0)]


def test_a_remote_admission_takes_a_seat_and_blocks_but_no_tokens() -> None:
    queue = [waiting(1, 100, remote=True), waiting(2, 100), waiting(3, 64, remote=True)]
    step = plan(queue=queue, cap=100, seats=3)
    assert step.admissions == [
        Admission(1, (), 2, 0),
        Admission(2, (), 2, 100),
        Admission(3, (), 2, 0),
    ]
    assert step.num_tokens == 100
    assert len(plan(queue=queue, cap=100, seats=2).admissions) == 2
    assert len(plan(queue=queue, cap=100, pool=5).admissions) == 2


def test_the_queue_is_strict_nobody_passes_a_head_that_does_not_fit() -> None:
    # E66 with a window of 0: needs of 60, 20 and 25 blocks, 50 free.
    queue = [waiting(1, 60 * BS), waiting(2, 20 * BS), waiting(3, 25 * BS)]
    assert plan(queue=queue, pool=50).admissions == []
    assert len(plan(queue=queue[1:], pool=50).admissions) == 2


def test_an_idle_node_admits_what_fits_its_pool_exactly() -> None:
    # E64, and the last block of the pool.
    assert len(plan(queue=[waiting(1, 7801)], pool=128).admissions) == 1
    assert len(plan(queue=[waiting(1, 8192)], pool=128).admissions) == 1
    assert plan(queue=[waiting(1, 8193)], pool=128, cap=9000).admissions == []


# --- cached blocks (F10) --------------------------------------------------------------------------


def test_a_claimed_cached_block_is_no_longer_evictable() -> None:
    # Both blocks that are available are the hit itself: nothing is left for the last token.
    pool = Pool(2, evictable=frozenset({5, 6}))
    cached = {1: (5, 6)}
    assert plan(queue=[waiting(1, 130)], pool=pool, cached=cached).admissions == []
    larger = Pool(3, evictable=frozenset({5, 6}))
    assert plan(queue=[waiting(1, 130)], pool=larger, cached=cached).admissions == [
        Admission(1, (5, 6), 1, 2)
    ]


def test_two_that_share_a_cached_prefix_claim_it_once() -> None:
    pool = Pool(4, evictable=frozenset({5, 6}))
    cached = {1: (5, 6), 2: (5, 6), 3: (5, 6)}
    queue = [waiting(1, 130), waiting(2, 130), waiting(3, 130)]
    step = plan(queue=queue, pool=pool, cached=cached)
    assert [(a.sequence_id, a.cached_block_ids, a.num_new_blocks) for a in step.admissions] == [
        (1, (5, 6), 1),
        (2, (5, 6), 1),
    ]


def test_a_hit_on_blocks_that_others_run_on_costs_nothing_available() -> None:
    cached = {1: (5, 6)}
    assert len(plan(queue=[waiting(1, 130)], pool=1, cached=cached).admissions) == 1
    assert plan(queue=[waiting(1, 130)], pool=0, cached=cached).admissions == []


def test_blocks_given_to_decodes_are_not_there_for_admissions() -> None:
    running = [decoding(1, 64), decoding(2, 64)]
    assert plan(running=running, queue=[waiting(3, 64)], pool=2).admissions == []
    assert len(plan(running=running, queue=[waiting(3, 64)], pool=3).admissions) == 1


# --- preemption -----------------------------------------------------------------------------------


def test_the_youngest_decode_pays_when_blocks_run_out() -> None:
    # E41 by order of arrival: last in, first out.
    running = [decoding(i, 64) for i in (1, 2, 3, 4, 5)]
    step = plan(running=running, pool=1)
    assert step.preempted == [5, 4]
    assert [c.sequence_id for c in step.chunks] == [1, 2, 3]
    assert sum(c.num_new_blocks for c in step.chunks) == 3


def test_no_sequence_is_both_planned_and_preempted() -> None:
    running = [decoding(i, 64) for i in range(1, 8)]
    for available in range(9):
        step = plan(running=running, pool=available)
        planned = {chunk.sequence_id for chunk in step.chunks}
        assert not planned & set(step.preempted)
        assert planned | set(step.preempted) == set(range(1, 8))
        assert sum(c.num_new_blocks for c in step.chunks) <= available + len(step.preempted)


def test_whoever_needs_a_block_and_is_the_youngest_preempts_itself() -> None:
    step = plan(running=[decoding(1, 70), decoding(2, 64)], pool=0)
    assert step.preempted == [2]
    assert [c.sequence_id for c in step.chunks] == [1]


def test_a_victim_is_credited_only_with_what_it_alone_holds() -> None:
    shared = frozenset({7})
    running = [decoding(1, 64, (1,)), decoding(2, 64, (7,)), decoding(3, 70, (8, 9))]
    step = plan(running=running, pool=Pool(0, shared=shared))
    assert step.preempted == [3]
    assert [c.sequence_id for c in step.chunks] == [1, 2]
    step = plan(running=[decoding(1, 64, (1,)), decoding(3, 64, (7,))], pool=Pool(0, shared=shared))
    assert step.preempted == [3]
    assert step.chunks == []


def test_the_last_decode_is_kept_and_waits_for_the_blocks_of_others() -> None:
    # E46: nobody to preempt, so it keeps its blocks; a prefill beside it goes on.
    running = [decoding(1, 64), prefilling(2, 200, 0)]
    step = plan(running=running, pool=0)
    assert step.preempted == []
    assert step.chunks == [Chunk(2, 200)]


def test_prefilling_sequences_are_never_preempted() -> None:
    # E45: all that run are prefilling.
    running = [prefilling(1, 200, 64), prefilling(2, 200, 64)]
    step = plan(running=running, queue=[waiting(3, 10)], pool=0)
    assert step.preempted == []
    assert [c.sequence_id for c in step.chunks] == [1, 2]
    assert step.admissions == []


def test_a_preemption_stops_the_admissions_of_its_step() -> None:
    running = [decoding(1, 64), decoding(2, 64 * 20, 20)]
    step = plan(running=running, queue=[waiting(3, 10)], pool=0)
    assert step.preempted == [2]
    assert step.admissions == []


def test_the_same_input_gives_the_same_plan() -> None:
    running = [decoding(1, 64), decoding(2, 70), prefilling(3, 300, 64)]
    queue = [waiting(4, 130), waiting(5, 64, remote=True)]
    cached = {4: (5, 6)}
    pool = Pool(6, evictable=frozenset({5, 6}))
    assert plan(running=running, queue=queue, pool=pool, cached=cached) == plan(
        running=running, queue=queue, pool=pool, cached=cached
    )
