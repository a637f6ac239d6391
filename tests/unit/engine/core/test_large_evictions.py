"""A plan that evicts more than was copied ahead: that is copied first, few blocks in each step."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from engine.core.kept_prefixes import MOST_AT_ONCE
from engine.core.planner_contract import StopRule
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import (
    STRICT,
    Engine,
    check_idle,
    make_prompt,
    make_request,
    num_late_copies,
    status_of,
)
from tests.support.engine.keeping import (
    FAMILIES,
    FAMILY_BLOCKS,
    LARGE,
    LATE,
    ask_large,
    check_all_found,
    check_answer,
    counters,
    fill_and_release,
    finish_copies,
    found_by_family,
    full_pool,
    full_pool_since_used,
    keeping,
    num_copied,
    rest,
    steps_until,
)


@LATE
@pytest.mark.parametrize("num_blocks", [40, 150, 380])
def test_whatever_the_size_of_an_eviction_nothing_that_was_used_twice_is_lost(
    num_blocks: int, num_copy_polls: int | None
) -> None:
    engine = full_pool(num_copy_polls=num_copy_polls)
    num_before = engine.scheduler.pool.num_evicted
    large = ask_large(engine, num_blocks)
    engine.run()
    assert engine.scheduler.pool.num_evicted - num_before >= num_blocks - 20
    check_all_found(engine)
    check_answer(engine, large)
    check_idle(engine.scheduler)


@LATE
def test_no_step_copies_many_blocks_however_large_the_eviction(num_copy_polls: int | None) -> None:
    """A step that copies makes what it decodes wait."""
    engine = full_pool(num_copy_polls=num_copy_polls)
    large, copied = ask_large(engine, 380), []
    for step in steps_until(engine, lambda: status_of(large) is not SequenceStatus.WAITING):
        copied.append(num_copied(step))
        assert step.sequences or step.stopped_by in (StopRule.FETCHING, StopRule.NO_BLOCKS)
    assert max(copied) == MOST_AT_ONCE
    num_steps = math.ceil(sum(copied) / MOST_AT_ONCE)
    assert len(copied) <= (num_steps + 1) * (1 + (num_copy_polls or 0)) + 1
    assert num_steps > 8


@LATE
def test_what_is_copied_ahead_counts_among_what_a_step_copies(num_copy_polls: int | None) -> None:
    engine = full_pool_since_used(num_copy_polls=num_copy_polls)
    large = ask_large(engine, 380)
    steps = steps_until(engine, lambda: status_of(large) is not SequenceStatus.WAITING)
    assert max(map(num_copied, steps)) == MOST_AT_ONCE


def test_a_prompt_whose_evictions_one_step_copies_does_not_wait() -> None:
    engine = full_pool()
    large = ask_large(engine, 70)
    step = engine.plan()
    assert 0 < num_copied(step) <= MOST_AT_ONCE
    assert status_of(large) is not SequenceStatus.WAITING


@LATE
def test_steps_that_are_planned_ahead_do_not_pass_a_prompt_whose_evictions_are_copied(
    num_copy_polls: int | None,
) -> None:
    engine = full_pool(num_copy_polls=num_copy_polls, seats=2, is_ahead=True)
    long = engine.add(make_request(make_prompt(5, 70), max_tokens=150, ignore_eos=True))
    engine.step()
    large, num_steps = ask_large(engine, 250), 0
    while status_of(large) is SequenceStatus.WAITING:
        engine.step()
        num_steps += 1
    assert status_of(long) is SequenceStatus.RUNNING_DECODE
    assert num_steps <= (math.ceil(250 / MOST_AT_ONCE) + 3) * (1 + (num_copy_polls or 0))
    engine.run()
    check_answer(engine, large)
    check_answer(engine, long)


@LATE
def test_a_reservation_waits_too(num_copy_polls: int | None) -> None:
    """Another node writes its blocks as soon as it has them."""
    engine = full_pool(num_copy_polls=num_copy_polls)
    large = ask_large(engine, 380, has_remote_kv=True)
    engine.run_until(lambda: status_of(large) is SequenceStatus.WAITING_FOR_KV)
    finish_copies(engine)
    rest(engine)
    check_all_found(engine)
    engine.scheduler.finish(large)
    engine.scheduler.end_quarantine(large)
    check_idle(engine.scheduler)


@LATE
@pytest.mark.parametrize("num_new", [5, 40, 150, 350])
def test_what_is_evicted_in_place_of_what_a_prompt_begins_with_is_not_lost(
    num_new: int, num_copy_polls: int | None
) -> None:
    """It begins with what would be evicted first: as many blocks behind that are evicted more."""
    engine = full_pool(num_copy_polls=num_copy_polls)
    prompt = (*make_prompt(76, FAMILIES[0]), *make_prompt(4 * num_new, LARGE))
    asked = engine.add(make_request(prompt, max_tokens=1))
    engine.run()
    assert asked.num_cached_tokens - asked.num_host_tokens == 4 * (FAMILY_BLOCKS - 1)
    check_all_found(engine)


@LATE
def test_what_a_prompt_begins_with_is_not_evicted_for_what_it_evicts(
    num_copy_polls: int | None,
) -> None:
    """Host memory is full: what is copied there takes the place of what was used first."""
    engine = full_pool(14 * FAMILY_BLOCKS, num_copy_polls=num_copy_polls)
    fill_and_release(engine, 200, LARGE)
    rest(engine)
    first = min(
        one for one, number in found_by_family(engine).items() if number == FAMILY_BLOCKS - 1
    )
    prompt = (*make_prompt(76, first), *make_prompt(4 * 300, LARGE + 1))
    asked = engine.add(make_request(prompt, max_tokens=1))
    engine.run()
    assert asked.num_cached_tokens == asked.num_host_tokens == 4 * (FAMILY_BLOCKS - 1)
    check_answer(engine, asked)


@LATE
def test_others_pass_a_prompt_whose_evictions_are_copied(num_copy_polls: int | None) -> None:
    engine = full_pool(num_copy_polls=num_copy_polls, seats=2, skip_ahead_window=2)
    large = ask_large(engine, 380)
    short = engine.add(make_request(make_prompt(5, 70), max_tokens=3, ignore_eos=True))
    engine.run_until(lambda: status_of(short) is SequenceStatus.FINISHED)
    assert status_of(large) is SequenceStatus.WAITING
    engine.run()
    check_answer(engine, large)
    check_answer(engine, short)
    check_all_found(engine)


@LATE
def test_a_prompt_that_ends_while_its_evictions_are_copied_leaves_nothing(
    num_copy_polls: int | None,
) -> None:
    engine = full_pool(num_copy_polls=num_copy_polls)
    large = ask_large(engine, 380)
    engine.step()
    assert engine.scheduler.kept_prefixes.awaiting == {large.sequence_id}
    engine.scheduler.finish(large)
    finish_copies(engine)
    rest(engine)
    assert not engine.scheduler.kept_prefixes.awaiting
    check_idle(engine.scheduler)
    check_all_found(engine)


@LATE
def test_of_more_than_host_memory_holds_the_last_ones_are_copied_and_no_others(
    num_copy_polls: int | None,
) -> None:
    engine = full_pool(60, num_copy_polls=num_copy_polls)
    num_before = counters(engine).num_prefix_blocks_out
    fill_and_release(engine, 380, LARGE)
    assert counters(engine).num_prefix_blocks_out - num_before <= 60 + MOST_AT_ONCE
    kept = Counter(found_by_family(engine).values())
    assert kept[FAMILY_BLOCKS - 1] >= 2
    assert sum(number * times for number, times in kept.items()) >= 55


@LATE
def test_without_room_in_host_memory_nothing_waits(num_copy_polls: int | None) -> None:
    engine = full_pool(0, num_copy_polls=num_copy_polls)
    large = ask_large(engine, 380)
    step = engine.plan()
    assert step.sequences == [large]
    engine.apply(step)
    engine.run()
    check_answer(engine, large)
    check_idle(engine.scheduler)


@LATE
def test_what_many_answers_evict_in_one_step_is_not_lost(num_copy_polls: int | None) -> None:
    """Their prompts came one by one, so no step before took more than two blocks."""
    size, num_answers, families = 64, 40, range(1, 21)
    engine = Engine(
        num_blocks=2 * num_answers,
        seats=num_answers,
        budget=1000,
        block_size=size,
        max_model_len=8 * size,
        num_host_blocks=400,
        keeps_prefixes=True,
        num_copy_polls=num_copy_polls,
        **STRICT,
    )
    for family in families:
        for _ in range(2):
            engine.add(make_request(make_prompt(2 * size + 1, family), max_tokens=1))
            engine.run()
    asked = []
    for number in range(num_answers):
        prompt = make_prompt(20 + number, 100 + number)
        asked.append(engine.add(make_request(prompt, max_tokens=50, ignore_eos=True)))
        engine.step()
    evicted, copied = [], []
    while engine.scheduler.running:
        num_before = engine.scheduler.pool.num_evicted
        step = engine.plan()
        evicted.append(engine.scheduler.pool.num_evicted - num_before)
        copied.append(num_copied(step))
        engine.apply(step)
    assert max(evicted) == num_answers
    if num_copy_polls is None:  # in that step
        assert num_answers // 2 < max(copied) <= MOST_AT_ONCE + num_answers
    else:  # before
        assert 0 < max(copied) <= MOST_AT_ONCE
    probes = [Sequence(999, make_request(make_prompt(2 * size + 1, one))) for one in families]
    assert {engine.scheduler.num_cached_tokens(one) for one in probes} == {2 * size}
    for sequence in asked:
        check_answer(engine, sequence)


def test_a_prompt_does_not_wait_where_nothing_can_be_copied() -> None:
    """No late copy holds the last block that could be had."""
    engine = keeping(num_copy_polls=0, seats=2)
    long = engine.add(make_request(make_prompt(13, 70), max_tokens=8, ignore_eos=True))
    engine.step()
    engine.step()
    for _ in range(2):
        twice = engine.add(make_request(make_prompt(5, 1), max_tokens=1))
        engine.step()
        assert status_of(twice) is SequenceStatus.FINISHED
    engine.step()  # the long one takes the last free block
    pool = engine.scheduler.pool
    assert pool.num_available == 1
    assert pool.prefix_cache.unsaved.issuperset(pool.next_evicted(1))
    short = engine.add(make_request(make_prompt(3, 2), max_tokens=1))
    engine.step()
    assert status_of(short) is SequenceStatus.FINISHED
    assert status_of(long) is SequenceStatus.RUNNING_DECODE
    assert not num_late_copies(engine.scheduler)
