"""Which blocks go to host memory, when, and in which order they are evicted there."""

from __future__ import annotations

from itertools import takewhile

import pytest

from engine.core.blocks.block_pool import BlockPool
from engine.core.blocks.leaving_blocks import LEAST_AHEAD, REMEMBERED, USE_PAYS
from engine.core.kept_prefixes import MOST_AT_ONCE
from engine.core.sequences.sequence import Sequence
from tests.support.engine.build import Engine, make_prompt, make_request
from tests.support.engine.keeping import (
    LATE,
    NEVER,
    ask,
    counters,
    evict,
    fill_and_release,
    finish_copies,
    keeping,
    probe,
    rest,
    use_twice,
)


@LATE
def test_where_nothing_is_used_again_nothing_is_copied(num_copy_polls: int | None) -> None:
    engine = keeping(num_copy_polls=num_copy_polls)
    for family in range(6):
        ask(engine, family)
        rest(engine)
    assert counters(engine).num_prefix_blocks_out == 0
    assert ask(engine, 0).num_cached_tokens == 0


@LATE
def test_each_use_pays_for_some_copies_of_what_was_used_once(num_copy_polls: int | None) -> None:
    engine = keeping(300, num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    rest(engine)
    for family in range(10, 60):
        ask(engine, family)
        rest(engine)
    assert counters(engine).num_prefix_blocks_out == 3 + 3 * USE_PAYS
    use_twice(engine, 2)
    rest(engine)
    for family in range(110, 160):
        ask(engine, family)
        rest(engine)
    assert counters(engine).num_prefix_blocks_out == 2 * (3 + 3 * USE_PAYS)


def test_many_uses_pay_for_no_more_than_both_pools_hold() -> None:
    engine = keeping(20)
    for _ in range(40):
        ask(engine, 1)
    for family in range(20, 60):
        ask(engine, family)
        rest(engine)
    assert counters(engine).num_prefix_blocks_out == 3 + 26


@LATE
def test_what_was_used_once_is_kept_while_there_is_room(num_copy_polls: int | None) -> None:
    engine = keeping(num_copy_polls=num_copy_polls)
    use_twice(engine, 9)
    for family in range(4):
        ask(engine, family)
        rest(engine)
    assert ask(engine, 0).num_cached_tokens == 12


@pytest.mark.covers("F127")
@LATE
def test_what_comes_once_takes_a_tenth_from_what_was_used_twice(
    num_copy_polls: int | None,
) -> None:
    engine = keeping(30, num_copy_polls=num_copy_polls)
    for family in range(10):
        use_twice(engine, family)
        evict(engine)
    for _ in range(30):
        evict(engine)
    found = [engine.scheduler.num_cached_tokens(probe(family)) for family in range(10)]
    assert found == [0, *[12] * 9], "three blocks of thirty, those of what was used first"


@LATE
def test_of_what_comes_once_the_latest_is_kept(num_copy_polls: int | None) -> None:
    engine = keeping(30, num_copy_polls=num_copy_polls)
    for family in range(10):
        use_twice(engine, family)
        evict(engine)
    for family in range(100, 104):
        ask(engine, family)
        rest(engine)
    found = [engine.scheduler.num_cached_tokens(probe(family)) for family in range(100, 104)]
    assert found == [0, 0, 8, 12], "host memory has the last one, and the pool the end of another"


@pytest.mark.parametrize("num_copy_polls", [0, 2])
def test_what_was_copied_out_is_evicted_when_it_would_have_been(num_copy_polls: int) -> None:
    """A late copy holds it, and other blocks are evicted or copied meanwhile."""
    orders = []
    for keeps_prefixes in (False, True):
        engine = keeping(
            num_blocks=60, keeps_prefixes=keeps_prefixes, num_copy_polls=num_copy_polls
        )
        for family in range(30):
            ask(engine, family)
            if keeps_prefixes and family % 3 == 0:
                rest(engine)
        ask(engine, 22)
        if keeps_prefixes:
            rest(engine)
        pool = engine.scheduler.pool
        orders.append([pool.prefix_cache.hash_of(one) for one in pool.next_evicted(60)])
    assert orders[0] == orders[1]


@LATE
def test_a_prefix_that_was_computed_twice_was_used_twice(num_copy_polls: int | None) -> None:
    """Turns of a conversation are further apart than a small pool remembers."""
    engine = keeping(3, num_copy_polls=num_copy_polls)
    use_twice(engine, 2)
    rest(engine)
    for number in range(3):
        assert ask(engine, 1).num_cached_tokens == (12 if number == 2 else 0)
        evict(engine)


@LATE
@pytest.mark.parametrize(("num_more", "num_kept"), [(2, 0), (-4, 12)])
def test_what_was_computed_too_long_ago_is_new(
    num_more: int, num_kept: int, num_copy_polls: int | None
) -> None:
    engine = keeping(num_host_blocks=3, num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    rest(engine)
    ask(engine, 2)
    num_remembered = REMEMBERED * (6 + 3)
    for family in range(20, 20 + num_remembered // 3 + num_more):
        ask(engine, family)
        rest(engine)
    ask(engine, 2)
    evict(engine)
    assert engine.scheduler.num_cached_tokens(probe(2)) == num_kept
    assert engine.scheduler.num_cached_tokens(probe(1)) == 12 - num_kept


@LATE
def test_what_is_in_host_memory_already_is_not_copied_again(num_copy_polls: int | None) -> None:
    engine = keeping(200, num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    for _ in range(3):
        evict(engine)
        assert ask(engine, 1).num_cached_tokens == 12
    num_prefixes = engine.scheduler.host_pool.num_prefixes
    assert (counters(engine).num_prefix_blocks_out, counters(engine).num_prefix_blocks_in) == (
        num_prefixes,
        9,
    )


@pytest.mark.covers("F127")
@LATE
def test_what_was_copied_back_makes_room_and_is_copied_out_again(
    num_copy_polls: int | None,
) -> None:
    """The pool and host memory hold more prompts together than each of them alone."""
    given = {"num_blocks": 100, "budget": 64, "max_model_len": 64}
    engine = keeping(100, num_copy_polls=num_copy_polls, **given)
    for _ in range(2):
        for family in range(10):
            ask(engine, family, length=49)
            rest(engine)
    for _ in range(3):
        for family in range(10):
            assert ask(engine, family, length=49).num_cached_tokens == 48
            rest(engine)


@pytest.mark.covers("F127")
@LATE
@pytest.mark.parametrize("num_host_blocks", [1, 2])
def test_host_memory_that_is_full_keeps_what_it_holds(
    num_copy_polls: int | None, num_host_blocks: int
) -> None:
    """The start of a prefix is worth most, so it is copied last and evicted last."""
    engine = keeping(num_host_blocks, num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    evict(engine)
    assert engine.scheduler.num_cached_tokens(probe(1)) == 4 * num_host_blocks
    assert ask(engine, 1).num_cached_tokens == 4 * num_host_blocks


@pytest.mark.covers("F127")
@LATE
def test_the_prefix_that_was_not_used_for_longest_gives_way(num_copy_polls: int | None) -> None:
    engine = keeping(6, num_copy_polls=num_copy_polls)
    for family in (1, 2):
        use_twice(engine, family)
        evict(engine)
    assert ask(engine, 1).num_cached_tokens == 12
    evict(engine)
    use_twice(engine, 3)
    evict(engine)
    found = [engine.scheduler.num_cached_tokens(probe(family)) for family in (1, 2, 3)]
    assert found == [12, 0, 12]


def pool_of(engine: Engine) -> BlockPool:
    return engine.scheduler.pool


def num_saved(engine: Engine) -> int:
    """How many blocks can be evicted before one that was not copied."""
    pool = engine.scheduler.pool
    order = pool.next_evicted(pool.num_blocks)
    return sum(1 for _ in takewhile(lambda one: one not in pool.prefix_cache.unsaved, order))


def test_how_far_ahead_is_forgotten_slowly() -> None:
    engine = keeping(600, num_blocks=600, budget=2400, max_model_len=2400)
    for family in range(1000, 1016):
        fill_and_release(engine, 41, family)
    for family in range(10, 105):
        fill_and_release(engine, 1, family)
        rest(engine)
        assert num_saved(engine) >= 40
    for _ in range(3000):
        engine.apply(engine.plan())
    for family in range(200, 300):
        fill_and_release(engine, 1, family)
        rest(engine)
    assert num_saved(engine) <= LEAST_AHEAD


@LATE
def test_of_a_long_prompt_that_comes_once_the_beginning_is_kept(
    num_copy_polls: int | None,
) -> None:
    engine = keeping(30, num_blocks=18, num_copy_polls=num_copy_polls, max_model_len=64)
    use_twice(engine, 1)
    host_pool = engine.scheduler.host_pool
    host_pool.keep(host_pool.allocate(30), [b"hot %d" % number for number in range(30)])
    hashes = ask(engine, 2, length=53).block_hashes[:13]
    rest(engine)
    kept = [place for place, one in enumerate(hashes) if host_pool.find(one) is not None]
    assert len(kept) == 3
    assert kept[-1] < 8


@pytest.mark.parametrize("num_taken", [2, LEAST_AHEAD, 40, 300, 600])
def test_blocks_are_copied_out_as_far_ahead_as_three_steps_take(num_taken: int) -> None:
    num_blocks = 1000
    engine = keeping(
        num_blocks, num_blocks=num_blocks, budget=8 * num_blocks, max_model_len=4 * num_blocks
    )
    for family in range(1, num_blocks // num_taken + 2):
        fill_and_release(engine, num_taken, family)
    num_before, num_evicted = counters(engine).num_prefix_blocks_out, pool_of(engine).num_evicted
    rest(engine)
    num_ahead = max(min(3 * num_taken, num_blocks), LEAST_AHEAD)
    cache = engine.scheduler.pool.prefix_cache
    is_saved = [one not in cache.unsaved for one in engine.scheduler.pool.next_evicted(num_blocks)]
    num_saved = sum(is_saved)
    assert all(is_saved[:num_saved])
    assert num_ahead // 2 <= num_saved <= num_ahead
    assert num_before <= counters(engine).num_prefix_blocks_out <= num_evicted + num_ahead


@LATE
@pytest.mark.parametrize("num_taken", [100, 400])
def test_what_the_first_eviction_takes_is_kept_as_a_whole(
    num_taken: int, num_copy_polls: int | None
) -> None:
    """Steps have taken as many free blocks before, so it is copied while there are some left."""
    engine = keeping(
        1600, num_blocks=1000, num_copy_polls=num_copy_polls, budget=8000, max_model_len=4000
    )
    for family in range(1, 1000 // num_taken + 2):
        for _ in range(2):
            fill_and_release(engine, num_taken, family)
            rest(engine)
    assert pool_of(engine).num_evicted > num_taken // 2
    asked = Sequence(999, make_request(make_prompt(4 * num_taken, 1)))
    assert engine.scheduler.num_cached_tokens(asked) == 4 * (num_taken - 1), "it has holes"


def test_while_much_is_free_nothing_is_copied() -> None:
    engine = keeping(1600, num_blocks=1000, budget=8000, max_model_len=4000)
    for _ in range(2):
        fill_and_release(engine, 300, 1)
    rest(engine)
    assert counters(engine).num_prefix_blocks_out == 0


def test_late_copies_change_no_order_behind_the_last_that_is_copied() -> None:
    """What was sent to another node is saved already, and evicted last."""
    engine = keeping(30, num_blocks=24, num_copy_polls=0, max_model_len=64)
    transfers, pool = engine.scheduler.prefix_transfers, pool_of(engine)
    for family in (1, 1, 2, 2, 3, 3):
        fill_and_release(engine, 8, family)
        rest(engine)
    sent = pool.next_evicted(24)[:6]
    assert pool.prefix_cache.unsaved.isdisjoint(sent)
    transfers.unpin(transfers.pin([pool.prefix_cache.hash_of(one) for one in sent]))
    order = pool.next_evicted(24)
    assert set(order[-6:]) == set(sent)
    pool.prefix_cache.note_use(order[:-6])
    num_before = counters(engine).num_prefix_blocks_out
    rest(engine)
    assert counters(engine).num_prefix_blocks_out > num_before
    assert pool.next_evicted(24) == order


@LATE
def test_what_a_long_prompt_evicts_at_once_is_kept_as_a_whole(num_copy_polls: int | None) -> None:
    """Nothing is found of a prefix that has lost its beginning."""
    given = {"num_blocks": 1000, "budget": 8000, "max_model_len": 4000}
    engine = keeping(1600, num_copy_polls=num_copy_polls, **given)
    for family in range(1, 8):
        for _ in range(2):
            fill_and_release(engine, 400, family)
            rest(engine)
    for family in (4, 5, 6, 7):
        asked = Sequence(999, make_request(make_prompt(4 * 400, family)))
        assert engine.scheduler.num_cached_tokens(asked) == 4 * 399, f"{family} has holes"


def test_few_blocks_are_copied_out_in_one_step() -> None:
    """A step that copies makes what it decodes wait."""
    engine = keeping(1000, num_blocks=1000, budget=8000, max_model_len=4000)
    most = 0
    for family in range(1, 6):
        for _ in range(2):
            engine.add(make_request(make_prompt(4 * 400 + 1, family), max_tokens=1))
            for _ in range(20):
                step = engine.plan()
                most = max(most, sum(len(copy.block_ids) for copy in step.swap_outs))
                engine.apply(step)
    assert most == MOST_AT_ONCE


def test_nothing_is_looked_at_until_it_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at half of a large pool takes longer than all else that a plan does."""
    engine = keeping(1000, num_blocks=1000, budget=8000, max_model_len=4000)
    for family in range(1000, 1011):
        fill_and_release(engine, 100, family)
    rest(engine)
    looks = []
    pool = engine.scheduler.pool
    next_evicted = pool.next_evicted

    def look(num_allocated: int) -> list[int]:
        looks.append(num_allocated)
        return next_evicted(num_allocated)

    monkeypatch.setattr(pool, "next_evicted", look)
    for family in range(10, 310):
        fill_and_release(engine, 1, family)
    assert 0 < len(looks) < 40
    assert num_saved(engine) >= 50


def test_blocks_are_copied_out_many_at_a_time() -> None:
    engine = keeping(300, num_blocks=100, max_model_len=400)
    for _ in range(2):
        fill_and_release(engine, 99, 1)
    copied = []
    for family in range(20, 60):
        engine.add(make_request(make_prompt(5, family), max_tokens=1))
        step = engine.plan()
        copied += [len(copy.block_ids) for copy in step.swap_outs]
        engine.apply(step)
    assert sum(copied) >= 40
    assert min(copied) >= LEAST_AHEAD // 2


def test_late_copies_out_take_half_of_what_is_available_and_one_is_under_way() -> None:
    engine = keeping(num_blocks=4, num_copy_polls=NEVER)
    for _ in range(2):
        engine.add(make_request(make_prompt(13, 1), max_tokens=2, ignore_eos=True))
        engine.run_until(lambda: not (engine.scheduler.waiting or engine.scheduler.running))
    for _ in range(3):
        engine.step()
        assert [len(one.block_ids) for one in engine.scheduler.kept_prefixes.under_way] == [2]
    assert engine.scheduler.pool.num_available == 2
    finish_copies(engine)
    rest(engine)
    assert engine.scheduler.host_pool.num_prefixes == 3


def test_what_is_used_while_it_is_copied_out_is_evicted_last() -> None:
    engine = keeping(num_blocks=10, num_copy_polls=0)
    for _ in range(2):
        fill_and_release(engine, 3, 1)
    rest(engine)
    engine.runner.num_copy_polls = NEVER
    fill_and_release(engine, 3, 2)
    (copy,) = engine.scheduler.kept_prefixes.under_way
    assert len(copy.block_ids) == 2
    fill_and_release(engine, 3, 1)
    finish_copies(engine)
    rest(engine)
    pool = engine.scheduler.pool
    hashes = list(map(pool.prefix_cache.hash_of, pool.next_evicted(pool.num_blocks)))
    assert hashes[-2:] == copy.hashes[::-1]
