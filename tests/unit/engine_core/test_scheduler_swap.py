"""Preempted sequences with KV in host memory: copied out, copied back, and out of host blocks."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.sequence import Sequence
from engine.core.status import SequenceStatus
from tests.fakes.hash_runner import expected_tokens
from tests.unit.engine_core.build import (
    STRICT,
    Engine,
    check_books,
    check_idle,
    make_request,
    status_of,
)


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


def test_s39_kv_comes_back_from_host_memory_and_nothing_is_computed_twice() -> None:
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


def test_s39_without_room_in_host_memory_it_is_recomputed() -> None:
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


@pytest.mark.parametrize("num_host_blocks", [8, 2])
def test_s39_places_are_free_again_when_one_ends_while_it_is_out(num_host_blocks: int) -> None:
    """F48."""
    engine = swap_engine(num_host_blocks)
    old, young = two_that_collide(engine)
    engine.scheduler.finish(young)
    check_books(engine.scheduler)
    assert engine.scheduler.host_pool.num_used == 0
    engine.run()
    check_answers(engine, old)
    check_idle(engine.scheduler)


def test_s39_blocks_that_the_prefix_cache_still_holds_are_not_copied_back() -> None:
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
