"""Prefixes in host memory: copied out before they are evicted, found again, never half copied."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.kept_prefixes import LEAST_AHEAD, MOST_AHEAD, REMEMBERED, USE_PAYS
from engine.core.planner_contract import StopRule
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.statistics import StepCounters
from tests.support.engine.build import (
    STRICT,
    Engine,
    check_books,
    check_idle,
    make_prompt,
    make_request,
    num_cached_tokens_and_blocks,
    num_late_copies,
    status_of,
)
from tests.support.engine.hash_runner import expected_tokens

NEVER = 1_000_000
LATE = pytest.mark.parametrize("num_copy_polls", [None, 0, 2], ids=["in step", "late", "later"])


def keeping(num_host_blocks: int = 16, **given: Any) -> Engine:
    """A pool of 6 blocks of 4 tokens: a prompt of 13 tokens and its output take 4 of them."""
    settings = {"num_blocks": 6, "seats": 1, "keeps_prefixes": True, **STRICT, **given}
    return Engine(num_host_blocks=num_host_blocks, **settings)


def ask(engine: Engine, family: int, *, length: int = 13, **given: Any) -> Sequence:
    """Answer a prompt of 13 tokens, whose first three blocks are full."""
    salt = given.pop("cache_salt", "")
    given = {"max_tokens": 2, "ignore_eos": True, "cache_salt": salt, **given}
    sequence = engine.add(make_request(make_prompt(length, family), **given))
    engine.run()
    check_answer(engine, sequence)
    check_idle(engine.scheduler)
    return sequence


def check_answer(engine: Engine, sequence: Sequence) -> None:
    request = sequence.request
    right = expected_tokens(request.prompt_token_ids, request.sampling)
    assert engine.outputs[sequence.sequence_id] == right


def use_twice(engine: Engine, family: int) -> None:
    ask(engine, family)
    assert ask(engine, family).num_cached_tokens == 12


def rest(engine: Engine) -> None:
    """Go on as long as there is anything to be copied, as a node does."""
    for _ in range(100):
        step = engine.plan()
        assert not step.sequences
        engine.apply(step)
        if not step.made_progress and not num_late_copies(engine.scheduler):
            return
    raise AssertionError("it never rests")


def evict(engine: Engine) -> None:
    """Fill the pool with what is used once, when all has been copied out."""
    rest(engine)
    for _ in range(engine.scheduler.pool.num_blocks // 3):
        ask(engine, 20 + len(engine.outputs))
    rest(engine)


def probe(family: int, **given: Any) -> Sequence:
    return Sequence(999, make_request(make_prompt(13, family), **given))


def counters(engine: Engine) -> StepCounters:
    return engine.scheduler.statistics().counters


def in_pool(engine: Engine, family: int) -> int:
    _, num_blocks = num_cached_tokens_and_blocks(engine.scheduler, probe(family))
    return num_blocks


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
def test_what_was_computed_too_long_ago_is_new(num_copy_polls: int | None) -> None:
    engine = keeping(num_host_blocks=3, num_copy_polls=num_copy_polls)
    use_twice(engine, 1)
    rest(engine)
    ask(engine, 2)
    num_remembered = REMEMBERED * (6 + 3)
    for family in range(20, 20 + num_remembered // 3 + 2):
        ask(engine, family)
        rest(engine)
    ask(engine, 2)
    evict(engine)
    assert engine.scheduler.num_cached_tokens(probe(2)) == 0
    assert engine.scheduler.num_cached_tokens(probe(1)) == 12


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


def test_without_the_setting_nothing_is_copied_or_noted() -> None:
    engine = keeping(keeps_prefixes=False)
    use_twice(engine, 1)
    evict(engine)
    assert ask(engine, 1).num_cached_tokens == 0
    assert engine.scheduler.host_pool.num_blocks == 0
    assert not engine.scheduler.pool.prefix_cache.reused


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


def finish_copies(engine: Engine) -> None:
    engine.runner.num_copy_polls = 0


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


# --- what a step does for it ---------------------------------------------------------------------


def fill_and_release(engine: Engine, num_blocks: int, family: int) -> None:
    """Compute a prompt of so many blocks, all of which then are cached."""
    prompt = make_prompt(4 * num_blocks, family)
    engine.add(make_request(prompt, max_tokens=1))
    engine.run_until(lambda: not (engine.scheduler.waiting or engine.scheduler.running))


@pytest.mark.parametrize("num_evicted", [2, LEAST_AHEAD, 40, MOST_AHEAD])
def test_blocks_are_copied_out_as_far_ahead_as_three_steps_evict(num_evicted: int) -> None:
    num_blocks = 4 * MOST_AHEAD
    engine = keeping(
        num_blocks, num_blocks=num_blocks, budget=8 * MOST_AHEAD, max_model_len=4 * num_blocks
    )
    fill_and_release(engine, num_blocks - 1, 1)
    assert counters(engine).num_prefix_blocks_out == 0
    fill_and_release(engine, num_evicted + 1, 2)
    num_before = counters(engine).num_prefix_blocks_out
    rest(engine)
    num_ahead = min(max(3 * num_evicted, LEAST_AHEAD), MOST_AHEAD)
    cache = engine.scheduler.pool.prefix_cache
    is_saved = [one not in cache.unsaved for one in engine.scheduler.pool.next_evicted(num_blocks)]
    num_saved = sum(is_saved)
    assert all(is_saved[:num_saved])
    assert num_ahead // 2 <= num_saved <= num_ahead
    assert num_before <= counters(engine).num_prefix_blocks_out <= num_evicted + num_ahead


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
