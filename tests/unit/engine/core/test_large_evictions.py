"""A plan that evicts more than was copied ahead: that is copied first, few blocks in each step.

So is what blocks evict that are taken between two plans, for a prefix of another node.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

from engine.core.kept_prefixes import MOST_AT_ONCE
from engine.core.planner_contract import StopRule
from engine.core.prefix_transfers import ComingPrefix
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.step.step_in_flight import PlannedStep
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
    LATE,
    check_answer,
    counters,
    fill_and_release,
    finish_copies,
    keeping,
    rest,
)

NUM_BLOCKS = 400
FAMILIES = range(1, 20)
FAMILY_BLOCKS = 20
LARGE = 99
"""The family of a prompt that is far larger than all before."""


def full(num_host_blocks: int = 2 * NUM_BLOCKS, **given: object) -> Engine:
    """A pool of 400 blocks that 19 prompts have used twice and filled, some of it copied ahead."""
    engine = keeping(
        num_host_blocks,
        **{"num_blocks": NUM_BLOCKS, "budget": 2000, "max_model_len": 4 * NUM_BLOCKS, **given},
    )
    for family in FAMILIES:
        for _ in range(2):
            fill_and_release(engine, FAMILY_BLOCKS, family)
            rest(engine)
    return engine


def ask_large(engine: Engine, num_blocks: int, **kind: bool) -> Sequence:
    prompt = make_prompt(4 * num_blocks - 3, LARGE)
    return engine.add(make_request(prompt, max_tokens=1), **kind)


def found(engine: Engine) -> dict[int, int]:
    """How many blocks of each family are found."""
    probes = {one: Sequence(999, make_request(make_prompt(80, one))) for one in FAMILIES}
    return {one: engine.scheduler.num_cached_tokens(probe) // 4 for one, probe in probes.items()}


def num_copied(step: PlannedStep) -> int:
    late = (copy.block_ids for copy in step.swap_copies if copy.is_out)
    return sum(map(len, [*late, *(copy.block_ids for copy in step.swap_outs)]))


@LATE
@pytest.mark.parametrize("num_blocks", [40, 150, 380])
def test_whatever_the_size_of_an_eviction_nothing_that_was_used_twice_is_lost(
    num_blocks: int, num_copy_polls: int | None
) -> None:
    engine = full(num_copy_polls=num_copy_polls)
    num_before = engine.scheduler.pool.num_evicted
    large = ask_large(engine, num_blocks)
    engine.run()
    assert engine.scheduler.pool.num_evicted - num_before >= num_blocks - 20
    assert found(engine) == dict.fromkeys(FAMILIES, FAMILY_BLOCKS - 1)
    check_answer(engine, large)
    check_idle(engine.scheduler)


@LATE
def test_no_step_copies_many_blocks_however_large_the_eviction(num_copy_polls: int | None) -> None:
    """A step that copies makes what it decodes wait."""
    engine = full(num_copy_polls=num_copy_polls)
    large, copied = ask_large(engine, 380), []
    while status_of(large) is SequenceStatus.WAITING:
        step = engine.plan()
        copied.append(num_copied(step))
        assert step.made_progress or num_late_copies(engine.scheduler)
        assert step.sequences or step.stopped_by in (StopRule.FETCHING, StopRule.NO_BLOCKS)
        engine.apply(step)
    assert max(copied) == MOST_AT_ONCE
    num_steps = math.ceil(sum(copied) / MOST_AT_ONCE)
    assert len(copied) <= (num_steps + 1) * (1 + (num_copy_polls or 0)) + 1
    assert num_steps > 8


@LATE
def test_what_is_copied_ahead_counts_among_what_a_step_copies(num_copy_polls: int | None) -> None:
    engine = full(num_copy_polls=num_copy_polls)
    fill_and_release(engine, 60, LARGE + 1)  # copies ahead of what comes next are not made yet
    large, copied = ask_large(engine, 380), []
    while status_of(large) is SequenceStatus.WAITING:
        step = engine.plan()
        copied.append(num_copied(step))
        engine.apply(step)
    assert max(copied) == MOST_AT_ONCE


def test_a_prompt_whose_evictions_one_step_copies_does_not_wait() -> None:
    engine = full()
    large = ask_large(engine, 70)
    step = engine.plan()
    assert 0 < num_copied(step) <= MOST_AT_ONCE
    assert status_of(large) is not SequenceStatus.WAITING


@LATE
def test_steps_that_are_planned_ahead_do_not_pass_a_prompt_whose_evictions_are_copied(
    num_copy_polls: int | None,
) -> None:
    engine = full(num_copy_polls=num_copy_polls, seats=2, is_ahead=True)
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
    engine = full(num_copy_polls=num_copy_polls)
    large = ask_large(engine, 380, has_remote_kv=True)
    engine.run_until(lambda: status_of(large) is SequenceStatus.WAITING_FOR_KV)
    finish_copies(engine)
    rest(engine)
    assert found(engine) == dict.fromkeys(FAMILIES, FAMILY_BLOCKS - 1)
    engine.scheduler.finish(large)
    engine.scheduler.end_quarantine(large)
    check_idle(engine.scheduler)


@LATE
@pytest.mark.parametrize("num_new", [5, 40, 150, 350])
def test_what_is_evicted_in_place_of_what_a_prompt_begins_with_is_not_lost(
    num_new: int, num_copy_polls: int | None
) -> None:
    """It begins with what would be evicted first: as many blocks behind that are evicted more."""
    engine = full(num_copy_polls=num_copy_polls)
    prompt = (*make_prompt(76, FAMILIES[0]), *make_prompt(4 * num_new, LARGE))
    asked = engine.add(make_request(prompt, max_tokens=1))
    engine.run()
    assert asked.num_cached_tokens - asked.num_host_tokens == 4 * (FAMILY_BLOCKS - 1)
    assert found(engine) == dict.fromkeys(FAMILIES, FAMILY_BLOCKS - 1)


@LATE
def test_what_a_prompt_begins_with_is_not_evicted_for_what_it_evicts(
    num_copy_polls: int | None,
) -> None:
    """Host memory is full: what is copied there takes the place of what was used first."""
    engine = full(14 * FAMILY_BLOCKS, num_copy_polls=num_copy_polls)
    fill_and_release(engine, 200, LARGE)
    rest(engine)
    first = min(one for one, number in found(engine).items() if number == FAMILY_BLOCKS - 1)
    prompt = (*make_prompt(76, first), *make_prompt(4 * 300, LARGE + 1))
    asked = engine.add(make_request(prompt, max_tokens=1))
    engine.run()
    assert asked.num_cached_tokens == asked.num_host_tokens == 4 * (FAMILY_BLOCKS - 1)
    check_answer(engine, asked)


@LATE
def test_others_pass_a_prompt_whose_evictions_are_copied(num_copy_polls: int | None) -> None:
    engine = full(num_copy_polls=num_copy_polls, seats=2, skip_ahead_window=2)
    large = ask_large(engine, 380)
    short = engine.add(make_request(make_prompt(5, 70), max_tokens=3, ignore_eos=True))
    engine.run_until(lambda: status_of(short) is SequenceStatus.FINISHED)
    assert status_of(large) is SequenceStatus.WAITING
    engine.run()
    check_answer(engine, large)
    check_answer(engine, short)
    assert found(engine) == dict.fromkeys(FAMILIES, FAMILY_BLOCKS - 1)


@LATE
def test_a_prompt_that_ends_while_its_evictions_are_copied_leaves_nothing(
    num_copy_polls: int | None,
) -> None:
    engine = full(num_copy_polls=num_copy_polls)
    large = ask_large(engine, 380)
    engine.step()
    assert engine.scheduler.kept_prefixes.awaiting == {large.sequence_id}
    engine.scheduler.finish(large)
    finish_copies(engine)
    rest(engine)
    assert not engine.scheduler.kept_prefixes.awaiting
    check_idle(engine.scheduler)
    assert found(engine) == dict.fromkeys(FAMILIES, FAMILY_BLOCKS - 1)


@LATE
def test_of_more_than_host_memory_holds_the_last_ones_are_copied_and_no_others(
    num_copy_polls: int | None,
) -> None:
    engine = full(60, num_copy_polls=num_copy_polls)
    num_before = counters(engine).num_prefix_blocks_out
    fill_and_release(engine, 380, LARGE)
    assert counters(engine).num_prefix_blocks_out - num_before <= 60 + MOST_AT_ONCE
    kept = Counter(found(engine).values())
    assert kept[FAMILY_BLOCKS - 1] >= 2
    assert sum(number * times for number, times in kept.items()) >= 55


@LATE
def test_without_room_in_host_memory_nothing_waits(num_copy_polls: int | None) -> None:
    engine = full(0, num_copy_polls=num_copy_polls)
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


def make_room(engine: Engine, num_blocks: int) -> list[int]:
    """Plan steps until so many blocks can be taken; return how many blocks each one copied."""
    transfers, copied = engine.scheduler.prefix_transfers, []
    while not transfers.make_room((), num_blocks):
        will_end = num_late_copies(engine.scheduler)
        step = engine.plan()
        copied.append(num_copied(step))
        assert step.made_progress or will_end, "nobody would ask again"
        engine.apply(step)
    return copied


def most_turns(num_blocks: int, num_copy_polls: int | None) -> float:
    """In how many turns so many blocks are copied; the engine ends late copies when it plans."""
    turns_of_copy = 1 if num_copy_polls is None else 2 + num_copy_polls
    return (num_blocks / MOST_AT_ONCE + 1) * turns_of_copy


def pull(engine: Engine, num_blocks: int) -> ComingPrefix:
    """Take blocks for a prefix of another node, which writes them."""
    hashes = [bytes([*divmod(number, 256)]) * 8 for number in range(num_blocks)]
    coming = engine.scheduler.prefix_transfers.begin((), hashes)
    assert coming is not None
    engine.step()
    engine.runner.cache[:, :, list(coming.block_ids)] = 0xEE
    return coming


@LATE
@pytest.mark.parametrize("num_blocks", [40, 150, 370])
def test_whatever_a_pull_evicts_nothing_that_was_used_twice_is_lost(
    num_blocks: int, num_copy_polls: int | None
) -> None:
    engine = full(num_copy_polls=num_copy_polls)
    copied = make_room(engine, num_blocks)
    coming = pull(engine, num_blocks)
    assert max(copied, default=0) <= MOST_AT_ONCE
    assert len(copied) <= most_turns(num_blocks, num_copy_polls)
    engine.scheduler.prefix_transfers.land(coming)
    rest(engine)
    assert found(engine) == dict.fromkeys(FAMILIES, FAMILY_BLOCKS - 1)
    for family in FAMILIES:
        again = engine.add(make_request(make_prompt(80, family), max_tokens=1))
        engine.run()
        assert again.num_cached_tokens == 4 * (FAMILY_BLOCKS - 1)
        check_answer(engine, again)
    check_idle(engine.scheduler)


@LATE
def test_there_is_room_where_nothing_is_lost(num_copy_polls: int | None) -> None:
    engine = full(num_copy_polls=num_copy_polls)
    transfers, num_free = engine.scheduler.prefix_transfers, engine.scheduler.pool.num_free
    assert transfers.has_room((), num_free)
    assert transfers.has_room((), num_free + 1), "that was copied ahead"
    assert not transfers.has_room((), 200)
    assert transfers.make_room((), num_free + 1)
    make_room(engine, 200)
    assert transfers.has_room((), 200)


@pytest.mark.parametrize("num_host_blocks", [0, 50])
def test_without_room_in_host_memory_a_pull_waits_for_no_more_than_that_takes(
    num_host_blocks: int,
) -> None:
    engine = full(num_host_blocks)
    assert sum(make_room(engine, 380)) <= num_host_blocks


@LATE
def test_nobody_waits_for_more_blocks_than_the_pool_has(num_copy_polls: int | None) -> None:
    engine = full(num_copy_polls=num_copy_polls)
    transfers, num_before = engine.scheduler.prefix_transfers, engine.scheduler.pool.num_available
    assert transfers.has_room((), num_before + 1)
    assert make_room(engine, num_before + 1) == []
    assert transfers.begin((), [bytes(16)] * (num_before + 1)) is None


def test_what_a_late_copy_holds_is_waited_for() -> None:
    engine = full(num_copy_polls=3)
    transfers, pool = engine.scheduler.prefix_transfers, engine.scheduler.pool
    num_all = pool.num_available
    assert not transfers.make_room((), num_all)
    engine.step()
    assert pool.num_available < num_all
    assert not transfers.has_room((), num_all)
    make_room(engine, num_all)
    assert pool.num_available == num_all
    pull(engine, num_all)


@LATE
def test_what_a_pull_begins_with_is_not_evicted_for_it(num_copy_polls: int | None) -> None:
    """It is what would be evicted first: as many blocks behind what is saved are evicted too."""
    engine = full(num_copy_polls=num_copy_polls)
    transfers, pool = engine.scheduler.prefix_transfers, engine.scheduler.pool
    num_saved = 2 * FAMILY_BLOCKS
    unsaved = pool.prefix_cache.unsaved
    make_room(engine, pool.num_free + num_saved)
    while unsaved.isdisjoint(pool.next_evicted(pool.num_free + num_saved + 1)):
        num_saved += 1
    first = Sequence(999, make_request(make_prompt(80, FAMILIES[0])))
    kept_ids, _ = transfers.missing(first, 76)
    assert kept_ids
    assert transfers.has_room((), pool.num_free + num_saved)
    assert transfers.has_room(kept_ids, pool.num_free + num_saved - len(kept_ids))
    assert not transfers.has_room(kept_ids, pool.num_free + num_saved - len(kept_ids) + 1)


@LATE
def test_no_prompt_takes_what_was_copied_for_a_pull(num_copy_polls: int | None) -> None:
    """Prompts come as fast as blocks are copied."""
    engine = full(num_copy_polls=num_copy_polls, seats=1)
    transfers, num_turns, asked = engine.scheduler.prefix_transfers, 0, []
    while not transfers.make_room((), 200):
        asked.append(ask_large(engine, MOST_AT_ONCE))
        engine.step()
        num_turns += 1
    assert num_turns <= most_turns(200, num_copy_polls)
    pull(engine, 200)
    engine.run()
    for one in asked:
        check_answer(engine, one)


@LATE
def test_a_prompt_that_evicts_nothing_passes_a_pull(num_copy_polls: int | None) -> None:
    engine = full(num_copy_polls=num_copy_polls)
    short = engine.add(make_request(make_prompt(9, LARGE), max_tokens=1))
    assert not engine.scheduler.prefix_transfers.make_room((), 200)
    engine.step()
    assert status_of(short) is SequenceStatus.FINISHED


@LATE
def test_a_plan_made_ahead_does_not_count_on_what_is_copied_for_a_pull(
    num_copy_polls: int | None,
) -> None:
    engine = full(num_copy_polls=num_copy_polls, seats=2, is_ahead=True)
    long = engine.add(make_request(make_prompt(5, 70), max_tokens=40, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine.was_ahead
    assert not engine.scheduler.prefix_transfers.make_room((), 200)
    engine.step()
    assert not engine.was_ahead
    engine.run()
    check_answer(engine, long)


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
