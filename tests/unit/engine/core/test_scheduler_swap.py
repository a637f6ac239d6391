"""Preempted sequences with KV in host memory: copied out, copied back, and out of host blocks."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.blocks.host_pool import HostPool
from engine.core.planner_contract import StopRule
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.step.step_in_flight import PlannedStep
from engine.core.swapping import Swapping
from tests.support.engine.build import (
    STRICT,
    Engine,
    check_books,
    check_idle,
    make_request,
    status_of,
    take_seat,
)
from tests.support.engine.hash_runner import expected_tokens


def swap_engine(num_host_blocks: int, **given: Any) -> Engine:
    """Two sequences of 8 tokens and 12 of output do not fit into its 6 blocks of 4 tokens."""
    settings = {"num_blocks": 6, "seats": 2, "caching": False, **STRICT, **given}
    return Engine(num_host_blocks=num_host_blocks, preemption_mode="swap", **settings)


def two_that_collide(engine: Engine, young_length: int = 8) -> tuple[Sequence, Sequence]:
    """Runs until the younger of two sequences has just been preempted."""
    old, young = (
        engine.add(make_request(length, seed=seed, max_tokens=12, ignore_eos=True))
        for seed, length in ((1, 8), (2, young_length))
    )
    engine.run_until(lambda: engine.num_preemptions > 0)
    assert status_of(young) is SequenceStatus.PREEMPTED
    return old, young


def check_answers(engine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        request = sequence.request
        right = expected_tokens(request.prompt_token_ids, request.sampling)
        assert engine.outputs[sequence.sequence_id] == right


def computed_tokens(engine: Engine, sequence: Sequence) -> int:
    return sum(
        len(scheduled.token_ids)
        for batch in engine.runner.batches
        for scheduled in batch
        if scheduled.sequence_id == sequence.sequence_id
    )


@pytest.mark.covers("S39")
def test_kv_comes_back_from_host_memory_and_nothing_is_computed_twice() -> None:
    engine = swap_engine(8)
    old, young = two_that_collide(engine)
    assert (young.num_swapped, len(young.host_block_ids), young.block_table) == (12, 3, [])
    assert engine.scheduler.statistics().num_host_blocks_used == 3
    engine.run()
    check_answers(engine, old, young)
    check_idle(engine.scheduler)
    statistics = engine.scheduler.statistics()
    assert (statistics.counters.num_swapped_out, statistics.counters.num_recomputed_tokens) == (
        3,
        0,
    )
    assert computed_tokens(engine, young) == 8 + 12 - 1


def test_a_block_that_is_partly_full_is_copied_too() -> None:
    engine = swap_engine(8)
    old, young = two_that_collide(engine, young_length=6)
    assert (young.num_swapped, len(young.host_block_ids)) == (10, 3)
    engine.run()
    check_answers(engine, old, young)
    check_idle(engine.scheduler)


def test_one_that_came_back_decodes_at_once() -> None:
    engine = swap_engine(8)
    old, young = two_that_collide(engine)
    engine.scheduler.finish(old)
    step = engine.plan()
    assert step.sequences == [young]
    assert status_of(young) is SequenceStatus.RUNNING_DECODE
    assert [len(copy.block_ids) for copy in step.swap_ins] == [3]
    assert len(step.batch[0].token_ids) == 1
    (output,) = engine.apply(step)
    assert output.first_index == 5
    engine.run()
    check_answers(engine, young)


def test_host_memory_that_is_just_large_enough_is_used() -> None:
    engine = swap_engine(3)
    _, young = two_that_collide(engine)
    assert (young.num_swapped, len(young.host_block_ids)) == (12, 3)
    assert engine.scheduler.host_pool.num_free == 0


@pytest.mark.covers("S39")
def test_without_room_in_host_memory_it_is_recomputed() -> None:
    engine = swap_engine(2)
    old, young = two_that_collide(engine)
    assert (young.num_swapped, young.host_block_ids) == (0, [])
    engine.run()
    check_answers(engine, old, young)
    check_idle(engine.scheduler)
    statistics = engine.scheduler.statistics()
    assert (statistics.counters.num_swapped_out, statistics.counters.num_recomputed_tokens) == (
        0,
        12,
    )


def test_recompute_uses_no_host_memory_even_if_there_is_some() -> None:
    engine = Engine(num_blocks=6, seats=2, caching=False, num_host_blocks=8, **STRICT)
    old, young = two_that_collide(engine)
    assert young.host_block_ids == []
    engine.run()
    check_answers(engine, old, young)
    assert engine.scheduler.statistics().counters.num_swapped_out == 0


@pytest.mark.covers("F48", "S39")
@pytest.mark.parametrize("num_host_blocks", [8, 2])
def test_places_are_free_again_when_one_ends_while_it_is_out(num_host_blocks: int) -> None:
    engine = swap_engine(num_host_blocks)
    old, young = two_that_collide(engine)
    engine.scheduler.finish(young)
    check_books(engine.scheduler)
    assert engine.scheduler.host_pool.num_used == 0
    engine.run()
    check_answers(engine, old)
    check_idle(engine.scheduler)


@pytest.mark.covers("S39")
def test_blocks_that_the_prefix_cache_still_holds_are_not_copied_back() -> None:
    engine = swap_engine(8, caching=True)
    old, young = two_that_collide(engine)
    engine.scheduler.finish(old)
    # Its three full blocks went to the cache; nobody has taken them since.
    found = engine.scheduler.num_cached_tokens(young)
    assert found >= 4
    step = engine.plan()
    assert [len(copy.block_ids) for copy in step.swap_ins] == (
        [(12 - found) // 4] if found < 12 else []
    )
    assert engine.scheduler.host_pool.num_used == 0
    engine.apply(step)
    engine.run()
    check_answers(engine, young)
    assert engine.scheduler.statistics().counters.num_recomputed_tokens == 0


def test_what_was_copied_back_is_found_by_others() -> None:
    engine = swap_engine(8, caching=True, num_blocks=7)
    old, young = two_that_collide(engine)
    engine.run()
    check_answers(engine, old, young)
    again = engine.add(make_request(8, seed=2, max_tokens=2, name="again"))
    engine.step()
    assert again.num_cached_tokens == 4


def test_a_block_changes_hands_in_the_step_that_swaps_it_out() -> None:
    # The copy is made before the step computes, so the new owner overwrites nothing that is needed.
    engine = swap_engine(8)
    old, young = (
        engine.add(make_request(8, seed=seed, max_tokens=12, ignore_eos=True)) for seed in (1, 2)
    )
    engine.run_until(lambda: old.num_computed == young.num_computed == 12)
    lost = set(young.block_table)
    step = engine.plan()
    ((copy,), table) = step.swap_outs, step.batch[0].block_table
    assert set(copy.block_ids) == lost
    assert lost & set(table)
    engine.apply(step)
    engine.run()
    check_answers(engine, old, young)


def test_swapping_with_drafts_gives_the_same_answers() -> None:
    engine = swap_engine(8, method="mtp", num_drafts=3, num_blocks=7)
    sequences = [
        engine.add(make_request(8, seed=seed, max_tokens=12, ignore_eos=True)) for seed in (1, 2)
    ]
    engine.run()
    check_answers(engine, *sequences)
    check_idle(engine.scheduler)
    assert engine.scheduler.statistics().counters.num_swapped_out > 0


# --- copies beside the steps ---------------------------------------------------------------------

NEVER = 1_000_000


def late_engine(num_copy_polls: int, **given: Any) -> Engine:
    return swap_engine(8, num_copy_polls=num_copy_polls, **given)


def finish_copies(engine: Engine) -> None:
    engine.runner.num_copy_polls = 0


def test_blocks_that_are_copied_out_are_not_reused_and_their_taker_waits() -> None:
    engine = late_engine(NEVER)
    old, young = two_that_collide(engine)
    (copy,) = engine.scheduler.swapping.copies_out
    assert copy.sequence is young
    assert len(copy.block_ids) == 3
    assert young.block_table == []
    assert engine.scheduler.pool.num_available == 0
    num_known = old.num_known
    for _ in range(4):
        step = engine.plan()
        assert not step.batch
        assert step.stopped_by is StopRule.COPYING
        assert engine.num_preemptions == 1
        engine.apply(step)
    assert old.num_known == num_known
    finish_copies(engine)
    engine.step()
    assert old.num_known == num_known + 1
    engine.run()
    check_answers(engine, old, young)
    check_idle(engine.scheduler)
    assert engine.scheduler.statistics().counters.num_recomputed_tokens == 0


def test_others_go_on_while_one_waits_for_blocks_that_are_copied_out() -> None:
    engine = late_engine(NEVER, num_blocks=9, seats=3)
    sequences = [
        engine.add(make_request(length, seed=seed, max_tokens=8, ignore_eos=True))
        for seed, length in ((1, 7), (2, 9), (3, 8))
    ]
    engine.run_until(lambda: engine.num_preemptions > 0)
    lengths = {s.sequence_id: s.num_known for s in sequences}
    step = engine.plan()
    assert step.stopped_by is StopRule.COPYING
    assert len(step.batch) == 1
    engine.apply(step)
    assert sum(s.num_known > lengths[s.sequence_id] for s in sequences) == 1
    finish_copies(engine)
    engine.run()
    check_answers(engine, *sequences)
    check_idle(engine.scheduler)


def until_copied_in(engine: Engine) -> tuple[Sequence, Sequence]:
    """The older one has ended, and the younger one is being copied back."""
    old, young = two_that_collide(engine)
    engine.run_until(lambda: not engine.scheduler.swapping.num_under_way)
    engine.scheduler.finish(old)
    engine.runner.num_copy_polls = NEVER
    engine.step()
    assert status_of(young) is SequenceStatus.SWAPPING_IN
    return old, young


def test_a_sequence_does_not_run_before_it_is_copied_back() -> None:
    engine = late_engine(0)
    _, young = until_copied_in(engine)
    other = engine.add(make_request(3, seed=5, max_tokens=3))
    for _ in range(4):
        step = engine.plan()
        assert young not in step.sequences
        engine.apply(step)
    assert status_of(other) is SequenceStatus.FINISHED
    assert engine.scheduler.host_pool.num_used == 3
    finish_copies(engine)
    step = engine.plan()
    assert step.sequences == [young]
    assert engine.scheduler.host_pool.num_used == 0
    engine.apply(step)
    engine.run()
    check_answers(engine, young)
    check_idle(engine.scheduler)
    assert engine.scheduler.statistics().counters.num_recomputed_tokens == 0


@pytest.mark.parametrize("is_good", [True, False])
def test_one_that_ends_while_it_is_copied_out_releases_everything_once(is_good: bool) -> None:
    engine = late_engine(NEVER)
    old, young = two_that_collide(engine)
    engine.scheduler.finish(young)
    check_books(engine.scheduler)
    assert engine.scheduler.host_pool.num_used == 3
    assert engine.scheduler.pool.num_available == 0
    engine.runner.copies[0]._is_failing = not is_good
    finish_copies(engine)
    engine.run()
    check_answers(engine, old)
    check_idle(engine.scheduler)


@pytest.mark.parametrize("is_good", [True, False])
def test_one_that_ends_while_it_is_copied_back_releases_everything_once(is_good: bool) -> None:
    engine = late_engine(0)
    _, young = until_copied_in(engine)
    engine.scheduler.finish(young)
    check_books(engine.scheduler)
    assert engine.scheduler.host_pool.num_used == 3
    assert engine.scheduler.pool.counts().quarantined == 4
    engine.runner.copies[0]._is_failing = not is_good
    finish_copies(engine)
    engine.run()
    check_idle(engine.scheduler)


@pytest.mark.parametrize("fails", ["out", "in"])
def test_what_could_not_be_copied_is_computed_again(fails: str) -> None:
    engine = late_engine(0)
    if fails == "out":
        engine.runner.fail_next_copy = True
        old, young = two_that_collide(engine)
        engine.run()
        check_answers(engine, old)
    else:
        _, young = until_copied_in(engine)
        engine.runner.copies[0]._is_failing = True
        finish_copies(engine)
        engine.run()
    check_answers(engine, young)
    check_idle(engine.scheduler)
    assert engine.scheduler.statistics().counters.num_recomputed_tokens > 0


def test_a_copy_out_that_fails_late_leaves_what_a_later_one_saves() -> None:
    """Between the two, the prefix cache held the whole sequence, and nothing was copied back."""
    swapping = Swapping(HostPool(4), 4, is_late=True)
    sequence, step = Sequence(1, make_request(8)), PlannedStep()
    take_seat(sequence, [5, 6], num_computed=8)
    swapping.swap_out(step, sequence)
    swapping.forget(sequence)
    swapping.swap_out(step, sequence)
    first, second = step.swap_copies
    swapping.end(first, is_good=False)
    assert sequence.host_block_ids == second.host_block_ids
    assert sequence.num_swapped == 8
    assert swapping.pool.num_used == 2
    swapping.end(second, is_good=True)
    swapping.forget(sequence)
    assert swapping.pool.num_used == 0


def test_a_copy_out_that_fails_behind_its_resumption_is_not_read() -> None:
    """The copy back was begun before the first one failed: what it copies is not used."""
    engine = late_engine(NEVER, num_blocks=7)
    old, young = two_that_collide(engine)
    engine.scheduler.finish(old)
    engine.step()
    assert status_of(young) is SequenceStatus.SWAPPING_IN
    engine.runner.copies[0]._is_failing = True
    finish_copies(engine)
    engine.run()
    check_answers(engine, young)
    check_idle(engine.scheduler)
    assert engine.scheduler.statistics().counters.num_recomputed_tokens == 12


def test_an_urgent_request_waits_for_one_victim_to_be_copied_out() -> None:
    engine = late_engine(
        NEVER, num_blocks=8, enable_priority_scheduling=True, min_progress_tokens=0
    )
    calm = [
        engine.add(make_request(8, seed=seed, max_tokens=8, ignore_eos=True)) for seed in (1, 2)
    ]
    engine.run_until(lambda: all(one.is_decoding for one in calm))
    urgent = engine.add(make_request(13, seed=3, max_tokens=3, ignore_eos=True, priority=1))
    engine.step()
    for _ in range(4):
        assert engine.num_preemptions == 1
        assert status_of(urgent) is SequenceStatus.WAITING
        engine.step()
    finish_copies(engine)
    engine.step()
    assert urgent in engine.scheduler.running
    engine.run()
    check_answers(engine, urgent, *calm)
    check_idle(engine.scheduler)


@pytest.mark.parametrize("num_copy_polls", range(1, 7))
@pytest.mark.parametrize("num_blocks", [5, 6, 7])
def test_a_copy_out_that_fails_behind_a_plan_made_ahead_is_not_counted_on(
    num_copy_polls: int, num_blocks: int
) -> None:
    """The plan may have seated the sequence on what the copy should have saved."""
    engine = late_engine(num_copy_polls, num_blocks=num_blocks, is_ahead=True)
    engine.runner.fail_next_copy = True
    old = engine.add(make_request(8, seed=1, max_tokens=7, ignore_eos=True))
    young = engine.add(make_request(8, seed=2, max_tokens=7, ignore_eos=True))
    for _ in range(60):
        step = engine.plan()
        assert (step.batch.num_tokens > 0).all()
        engine.apply(step)
    check_answers(engine, old, young)
    check_idle(engine.scheduler)
