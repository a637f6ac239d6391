"""What is evicted by blocks that are taken for a prefix of another node is copied first, too.

They are taken between two plans, and the other node writes them at once.
"""

from __future__ import annotations

import pytest

from engine.core.kept_prefixes import MOST_AT_ONCE
from engine.core.prefix_transfers import ComingPrefix
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import (
    Engine,
    check_idle,
    make_prompt,
    make_request,
    status_of,
)
from tests.support.engine.keeping import (
    FAMILIES,
    FAMILY_BLOCKS,
    LARGE,
    LATE,
    check_all_found,
    check_answer,
    full_pool,
    full_pool_since_used,
    num_copied,
    rest,
    steps_until,
)


def make_room(engine: Engine, num_blocks: int) -> list[int]:
    """Plan steps until so many blocks can be taken; return how many blocks each one copied."""
    make = engine.scheduler.prefix_transfers.make_room
    return [num_copied(step) for step in steps_until(engine, lambda: make((), num_blocks))]


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
    engine = full_pool(num_copy_polls=num_copy_polls)
    copied = make_room(engine, num_blocks)
    coming = pull(engine, num_blocks)
    assert max(copied, default=0) <= MOST_AT_ONCE
    assert len(copied) <= most_turns(num_blocks, num_copy_polls)
    engine.scheduler.prefix_transfers.land(coming)
    rest(engine)
    check_all_found(engine)
    for family in FAMILIES:
        again = engine.add(make_request(make_prompt(80, family), max_tokens=1))
        engine.run()
        assert again.num_cached_tokens == 4 * (FAMILY_BLOCKS - 1)
        check_answer(engine, again)
    check_idle(engine.scheduler)


@LATE
def test_what_is_copied_ahead_counts_among_what_a_step_copies_for_a_pull(
    num_copy_polls: int | None,
) -> None:
    engine = full_pool_since_used(num_copy_polls=num_copy_polls)
    assert max(make_room(engine, 200)) == MOST_AT_ONCE


@LATE
def test_there_is_room_where_nothing_is_lost(num_copy_polls: int | None) -> None:
    engine = full_pool(num_copy_polls=num_copy_polls)
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
    engine = full_pool(num_host_blocks)
    assert sum(make_room(engine, 380)) <= num_host_blocks


@LATE
def test_nobody_waits_for_more_blocks_than_the_pool_has(num_copy_polls: int | None) -> None:
    engine = full_pool(num_copy_polls=num_copy_polls)
    transfers, num_before = engine.scheduler.prefix_transfers, engine.scheduler.pool.num_available
    first = Sequence(999, make_request(make_prompt(80, FAMILIES[0])))
    kept_ids, _ = transfers.missing(first, 76)
    for kept, num_blocks in (((), num_before + 1), (tuple(kept_ids), num_before)):
        assert transfers.has_room(kept, num_blocks)
        assert transfers.make_room(kept, num_blocks)
        assert transfers.begin(kept, [bytes(16)] * num_blocks) is None


def test_what_a_late_copy_holds_is_waited_for() -> None:
    engine = full_pool(num_copy_polls=3)
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
    engine = full_pool(num_copy_polls=num_copy_polls)
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
    engine = full_pool(num_copy_polls=num_copy_polls, seats=1)
    transfers, num_turns, asked = engine.scheduler.prefix_transfers, 0, []
    while not transfers.make_room((), 200):
        prompt = make_prompt(4 * MOST_AT_ONCE - 3, LARGE + num_turns)
        asked.append(engine.add(make_request(prompt, max_tokens=1)))
        engine.step()
        num_turns += 1
    assert num_turns <= most_turns(200, num_copy_polls)
    pull(engine, 200)
    engine.run()
    for one in asked:
        check_answer(engine, one)


@LATE
def test_a_prompt_that_evicts_nothing_passes_a_pull(num_copy_polls: int | None) -> None:
    engine = full_pool(num_copy_polls=num_copy_polls)
    short = engine.add(make_request(make_prompt(9, LARGE), max_tokens=1))
    assert not engine.scheduler.prefix_transfers.make_room((), 200)
    engine.step()
    assert status_of(short) is SequenceStatus.FINISHED


@LATE
def test_a_plan_made_ahead_does_not_count_on_what_is_copied_for_a_pull(
    num_copy_polls: int | None,
) -> None:
    engine = full_pool(num_copy_polls=num_copy_polls, seats=2, is_ahead=True)
    long = engine.add(make_request(make_prompt(5, 70), max_tokens=40, ignore_eos=True))
    engine.step()
    engine.step()
    num_taken = engine.plans_ahead["taken"]
    assert not engine.scheduler.prefix_transfers.make_room((), 200)
    engine.step()
    assert engine.plans_ahead == {**engine.plans_ahead, "taken": num_taken, "new_work": 1}
    engine.run()
    check_answer(engine, long)
