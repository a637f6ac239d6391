"""Prefixes in host memory: copied out before they are evicted, found again, never half copied."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.blocks.block_pool import BlockUse
from engine.core.planner_contract import StopRule
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import (
    Engine,
    check_books,
    check_idle,
    make_prompt,
    make_request,
    status_of,
)
from tests.support.engine.keeping import (
    LATE,
    NEVER,
    ask,
    check_answer,
    counters,
    evict,
    finish_copies,
    in_pool,
    keeping,
    probe,
    rest,
    use_twice,
)


@pytest.mark.covers("F131")
@LATE
def test_a_prefix_that_was_used_twice_comes_back_from_host_memory(
    num_copy_polls: int | None,
) -> None:
    engine = keeping(num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    evict(engine)
    assert in_pool(engine, 1) == 0
    num_kept = engine.scheduler.statistics().num_prefix_host_blocks
    assert num_kept == counters(engine).num_prefix_blocks_out > 3
    assert engine.scheduler.num_cached_tokens(probe(1)) == 12
    num_batches = len(engine.runner.batches)
    again = ask(engine, 1)
    assert again.num_cached_tokens == 12
    computed = [
        len(one.token_ids) for batch in engine.runner.batches[num_batches:] for one in batch
    ]
    assert computed == [1, 1]
    assert counters(engine).num_prefix_blocks_in == 3
    assert counters(engine).prefix_blocks_found == {"pool": 3, "host": 3, "disk": 0}


@LATE
def test_what_the_pool_has_of_a_prefix_is_not_evicted_for_the_rest(
    num_copy_polls: int | None,
) -> None:
    engine = keeping(num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    rest(engine)
    ask(engine, 20, length=17)  # takes five blocks of six
    assert in_pool(engine, 1) == 1
    assert ask(engine, 1).num_cached_tokens == 12
    assert counters(engine).num_prefix_blocks_in == 2


@LATE
@pytest.mark.parametrize("is_in_both", [True, False])
def test_what_the_pool_has_behind_a_gap_is_not_copied_again(
    is_in_both: bool, num_copy_polls: int | None
) -> None:
    engine = keeping(num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    evict(engine)
    ask(engine, 1)
    rest(engine)
    pool, num_before = engine.scheduler.pool, counters(engine).num_prefix_blocks_in
    block_ids, _ = engine.scheduler.prefix_transfers.missing(probe(1), 12)
    first, host_pool = pool.prefix_cache.hash_of(block_ids[0]), engine.scheduler.host_pool
    pool.evict_next(block_ids[:1])
    pool.release(pool.allocate(pool.num_free + 1, BlockUse.RUNNING))
    if not is_in_both:
        kept = engine.scheduler.prefix_transfers.pin([first])
        host_pool.release(host_pool.allocate(host_pool.num_available))
        engine.scheduler.prefix_transfers.unpin(kept)
    assert engine.scheduler.num_cached_tokens(probe(1)) == 12, "a gap, and what is cached behind it"
    assert ask(engine, 1).num_cached_tokens == 12
    assert counters(engine).num_prefix_blocks_in == num_before + 1


def test_without_the_setting_nothing_is_copied_or_noted() -> None:
    engine = keeping(keeps_prefixes=False)
    use_twice(engine, 1)
    evict(engine)
    assert ask(engine, 1).num_cached_tokens == 0
    assert engine.scheduler.host_pool.num_blocks == 0
    assert not engine.scheduler.pool.prefix_cache.reused


@LATE
def test_a_sequence_knows_what_was_copied_back_for_it(num_copy_polls: int | None) -> None:
    engine = keeping(num_copy_polls=num_copy_polls)
    assert ask(engine, 1).num_host_tokens == 0
    assert ask(engine, 1).num_host_tokens == 0
    evict(engine)
    back = ask(engine, 1)
    assert (back.num_cached_tokens, back.num_host_tokens) == (12, 12)
    again = ask(engine, 1)
    assert (again.num_cached_tokens, again.num_host_tokens) == (12, 0)


@LATE
def test_a_salt_finds_only_its_own_prefixes(num_copy_polls: int | None) -> None:
    engine = keeping(num_copy_polls=num_copy_polls)
    ask(engine, 1, cache_salt="a")
    ask(engine, 1, cache_salt="a")
    evict(engine)
    assert ask(engine, 1).num_cached_tokens == 0
    assert ask(engine, 1, cache_salt="b").num_cached_tokens == 0
    evict(engine)
    assert ask(engine, 1, cache_salt="a").num_cached_tokens == 12


@pytest.mark.covers("F130")
@LATE
@pytest.mark.parametrize("method", ["none", "mtp", "suffix"])
def test_drafts_find_as_much_as_no_drafts(num_copy_polls: int | None, method: str) -> None:
    num_drafts = 0 if method == "none" else 2
    engine = keeping(num_copy_polls=num_copy_polls, method=method, num_drafts=num_drafts)
    use_twice(engine, 1)
    evict(engine)
    assert ask(engine, 1).num_cached_tokens == 12


@LATE
def test_a_prompt_that_is_scored_is_computed_whole(num_copy_polls: int | None) -> None:
    engine = keeping(num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    evict(engine)
    assert ask(engine, 1, prompt_logprobs=0).num_cached_tokens == 0
    assert counters(engine).num_prefix_blocks_in == 0


@pytest.mark.covers("F129")
@pytest.mark.parametrize("kind", ["has_remote_kv", "is_exported"])
@LATE
def test_handoffs_find_what_is_in_host_memory(num_copy_polls: int | None, kind: str) -> None:
    engine = keeping(num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    evict(engine)
    sequence = engine.add(make_request(make_prompt(13, 1), max_tokens=2), **{kind: True})
    wanted = SequenceStatus.WAITING_FOR_KV if kind == "has_remote_kv" else SequenceStatus.EXPORTING
    engine.run_until(lambda: sequence.status is wanted)
    assert sequence.num_cached_tokens == 12
    if kind == "has_remote_kv":
        engine.land(sequence)
        engine.run()
        check_answer(engine, sequence)
    else:
        engine.scheduler.release(sequence)
    check_idle(engine.scheduler)


# --- late copies ---------------------------------------------------------------------------------


def until_fetching(**given: Any) -> tuple[Engine, Sequence]:
    """A sequence waits for its prefix, whose copy does not end."""
    engine = keeping(num_copy_polls=0, **given)
    use_twice(engine, 1)
    evict(engine)
    engine.runner.num_copy_polls = NEVER
    waiting = engine.add(make_request(make_prompt(13, 1), max_tokens=2, ignore_eos=True))
    step = engine.plan()
    num_fetches = sum(not copy.is_out for copy in step.swap_copies)
    assert (step.stopped_by, num_fetches) == (StopRule.FETCHING, 1)
    engine.apply(step)
    return engine, waiting


@pytest.mark.covers("F125")
def test_nothing_is_found_before_its_copy_back_has_ended() -> None:
    engine, waiting = until_fetching()
    for _ in range(3):
        assert not engine.plan().batch
        assert in_pool(engine, 1) == 0
        assert engine.scheduler.pool.counts().receiving == 3
        assert status_of(waiting) is SequenceStatus.WAITING
    finish_copies(engine)
    step = engine.plan()
    assert step.sequences == [waiting]
    assert (waiting.num_cached_tokens, waiting.fetched) == (12, None)
    engine.apply(step)
    engine.run()
    check_answer(engine, waiting)
    check_idle(engine.scheduler)


@pytest.mark.covers("F125")
def test_nothing_is_found_before_its_copy_out_has_ended() -> None:
    engine = keeping(num_copy_polls=NEVER)
    first = engine.add(make_request(make_prompt(13, 1), max_tokens=2, ignore_eos=True))
    engine.run()
    again = engine.add(make_request(make_prompt(13, 1), max_tokens=2, ignore_eos=True))
    engine.run_until(lambda: status_of(again) is SequenceStatus.FINISHED)
    engine.step()
    (copy,) = engine.scheduler.kept_prefixes.under_way
    assert copy.is_out
    assert engine.scheduler.host_pool.num_prefixes == 0
    assert engine.scheduler.statistics().num_host_blocks_used == len(copy.block_ids)
    assert not any(map(engine.scheduler.pool.is_evictable, copy.block_ids))
    finish_copies(engine)
    engine.run()
    assert engine.scheduler.host_pool.num_prefixes == 3
    check_answer(engine, first)
    check_idle(engine.scheduler)


@pytest.mark.parametrize("is_good", [True, False])
def test_one_that_is_aborted_while_it_waits_leaves_the_copy_to_itself(is_good: bool) -> None:
    engine, waiting = until_fetching()
    engine.scheduler.finish(waiting)
    check_books(engine.scheduler)
    assert not engine.scheduler.pool.prefix_cache.match(waiting.block_hashes)
    engine.runner.copies[0]._is_failing = not is_good
    finish_copies(engine)
    engine.run()
    check_idle(engine.scheduler)
    assert in_pool(engine, 1) == (3 if is_good else 0)
    assert not engine.scheduler.kept_prefixes.awaiting


@pytest.mark.covers("F126")
def test_a_copy_back_that_fails_means_computing_and_is_not_tried_again() -> None:
    engine, waiting = until_fetching()
    engine.runner.copies[0]._is_failing = True
    finish_copies(engine)
    engine.run()
    check_answer(engine, waiting)
    check_idle(engine.scheduler)
    assert waiting.num_cached_tokens == 0
    assert not any(map(engine.scheduler.host_pool.find, waiting.block_hashes))
    assert counters(engine).num_prefix_blocks_in == 0


@pytest.mark.covers("F125")
def test_a_copy_out_that_fails_is_never_found() -> None:
    engine = keeping(num_copy_polls=0)
    ask(engine, 1)
    ask(engine, 1)
    engine.runner.fail_next_copy = True
    evict(engine)
    assert ask(engine, 1).num_cached_tokens == 0


@pytest.mark.covers("F132")
def test_others_go_on_while_one_waits_for_its_prefix() -> None:
    engine, waiting = until_fetching(num_blocks=12, seats=2, skip_ahead_window=2)
    other = engine.add(make_request(make_prompt(5, 7), max_tokens=3, ignore_eos=True))
    engine.run_until(lambda: status_of(other) is SequenceStatus.FINISHED)
    assert status_of(waiting) is SequenceStatus.WAITING
    finish_copies(engine)
    engine.run()
    check_answer(engine, waiting)
    check_answer(engine, other)


@pytest.mark.covers("F132")
def test_a_second_prompt_with_the_same_start_waits_for_the_same_copy() -> None:
    engine, waiting = until_fetching(num_blocks=12, seats=2, skip_ahead_window=2)
    second = engine.add(make_request(make_prompt(13, 1), seed=5, max_tokens=2, ignore_eos=True))
    step = engine.plan()
    assert not step.swap_copies
    assert engine.scheduler.kept_prefixes.awaiting == {waiting.sequence_id, second.sequence_id}
    engine.apply(step)
    finish_copies(engine)
    engine.run()
    assert (waiting.num_cached_tokens, second.num_cached_tokens) == (12, 12)
    assert counters(engine).num_prefix_blocks_in == 3
    check_answer(engine, waiting)
    check_answer(engine, second)
    check_idle(engine.scheduler)


def test_a_plan_made_ahead_is_made_again_when_a_prefix_has_come() -> None:
    engine, waiting = until_fetching(num_blocks=12, seats=2, skip_ahead_window=2, is_ahead=True)
    other = engine.add(make_request(make_prompt(5, 7), max_tokens=6, ignore_eos=True))
    engine.run_until(lambda: other.is_decoding)
    engine.step()
    finish_copies(engine)
    step = engine.plan()
    assert waiting in step.sequences
    engine.apply(step)
    engine.run()
    check_answer(engine, waiting)
    check_answer(engine, other)


# --- one pool with swapped sequences -------------------------------------------------------------


@LATE
def test_a_plan_made_ahead_that_lacks_what_is_in_host_memory_is_made_again(
    num_copy_polls: int | None,
) -> None:
    engine = keeping(64, num_blocks=12, is_ahead=True, num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    evict(engine)
    before = engine.plans_ahead.get("prefix", 0)
    engine.add(make_request(make_prompt(5, 90), max_tokens=5, ignore_eos=True))
    asked = engine.add(make_request(make_prompt(13, 1), max_tokens=2, ignore_eos=True))
    engine.run()
    assert asked.num_host_tokens == 12
    assert engine.plans_ahead.get("prefix", 0) - before == 1


@LATE
def test_a_preempted_sequence_takes_the_place_of_prefixes(num_copy_polls: int | None) -> None:
    engine = keeping(
        3, num_copy_polls=num_copy_polls, seats=2, preemption_mode="swap", min_progress_tokens=0
    )
    use_twice(engine, 1)
    evict(engine)
    assert engine.scheduler.host_pool.num_prefixes == 3
    old, young = (
        engine.add(make_request(8, seed=seed, max_tokens=12, ignore_eos=True)) for seed in (3, 4)
    )
    engine.run_until(lambda: engine.num_preemptions > 0)
    assert young.num_swapped == 12
    assert (engine.scheduler.host_pool.num_used, engine.scheduler.host_pool.num_prefixes) == (3, 0)
    engine.run()
    check_answer(engine, old)
    check_answer(engine, young)
    check_idle(engine.scheduler)
    assert counters(engine).num_recomputed_tokens == 0


@pytest.mark.covers("F126")
def test_a_prefix_that_is_read_does_not_give_way() -> None:
    engine, waiting = until_fetching(num_host_blocks=3, preemption_mode="swap")
    assert engine.scheduler.host_pool.num_available == 0
    with pytest.raises(ValueError, match="asked for 1 host blocks, 0 are free"):
        engine.scheduler.host_pool.allocate(1)
    finish_copies(engine)
    engine.run()
    assert engine.scheduler.host_pool.num_available == 3
    check_answer(engine, waiting)


@LATE
def test_a_prompt_that_takes_a_victims_place_fetches_what_there_is_room_for(
    num_copy_polls: int | None,
) -> None:
    engine = keeping(
        num_copy_polls=num_copy_polls, seats=2, enable_priority_scheduling=True,
        min_progress_tokens=0,
    )  # fmt: skip
    use_twice(engine, 1)
    evict(engine)
    low = engine.add(make_request(17, seed=3, max_tokens=6, ignore_eos=True))
    engine.run_until(lambda: low.is_decoding)
    assert engine.scheduler.pool.num_available < 3
    high = engine.add(make_request(make_prompt(13, 1), max_tokens=2, ignore_eos=True, priority=1))
    engine.run_until(lambda: status_of(high) is SequenceStatus.FINISHED)
    assert engine.num_preemptions == 1
    engine.run()
    check_answer(engine, low)
    check_answer(engine, high)
    check_idle(engine.scheduler)


@pytest.mark.covers("F149")
@LATE
@pytest.mark.parametrize("room", [8, 10])
@pytest.mark.parametrize("lengths", [(25, 29), (29, 17), (29, 29)])
@pytest.mark.parametrize("window", [0, 2])
def test_prompts_that_return_together_and_have_no_room_together_are_all_answered(
    room: int, lengths: tuple[int, int], window: int, num_copy_polls: int | None
) -> None:
    """What is copied back for one prompt must not keep the other one from ever being seated."""
    engine = keeping(
        32, num_copy_polls=num_copy_polls, num_blocks=room, seats=2, skip_ahead_window=window
    )
    for family in (1, 2):
        use_twice(engine, family)
    evict(engine)
    found = [engine.scheduler.num_cached_tokens(probe(family)) for family in (1, 2)]
    assert found == [12, 12]
    both = [
        engine.add(make_request(make_prompt(length, family), max_tokens=2, ignore_eos=True))
        for family, length in enumerate(lengths, 1)
    ]
    engine.run()
    for one in both:
        check_answer(engine, one)
    check_idle(engine.scheduler)
