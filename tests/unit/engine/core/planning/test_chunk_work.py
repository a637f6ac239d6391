"""Chunks beside decodes: no longer than a step at the start of a prompt takes work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.planner_contract import StopRule
from engine.core.planning.step_budget import chunk_work, tokens_within
from tests.support.engine.planner_views import (
    admitted,
    decoding,
    plan,
    prefilling,
    tokens,
    victims,
    waiting,
)

fixed = settings(derandomize=True, deadline=None, database=None)
COUNTS = st.integers(0, 1 << 20)


def brute_work(start: int, num_tokens: int, pairs_per_token: int) -> int:
    return sum(pairs_per_token + place + 1 for place in range(start, start + num_tokens))


@fixed
@given(st.integers(0, 200), st.integers(0, 60), st.integers(0, 60), st.integers(1, 300))
def test_the_work_of_a_chunk_is_the_sum_over_its_tokens_however_it_is_divided(
    start: int, first: int, second: int, pairs: int
) -> None:
    whole = chunk_work(start, first + second, pairs)
    assert whole == brute_work(start, first + second, pairs)
    assert whole == chunk_work(start, first, pairs) + chunk_work(start + first, second, pairs)


@fixed
@given(st.integers(-10, 1 << 50), COUNTS, st.integers(1, 1 << 20))
def test_the_most_tokens_within_some_work_are_exact(work: int, start: int, pairs: int) -> None:
    count = tokens_within(work, start, pairs)
    assert count >= 0
    assert count == 0 or chunk_work(start, count, pairs) <= work
    assert chunk_work(start, count + 1, pairs) > work


@pytest.mark.covers("S59")
@pytest.mark.parametrize(
    ("computed", "wanted"), [(0, 2047), (2048, 1917), (28_000, 1056), (100_000, 467)]
)
def test_a_chunk_beside_a_decode_shrinks_with_its_context(computed: int, wanted: int) -> None:
    running = [prefilling(1, computed + 9000, computed), decoding(2, 100)]
    step = plan(running=running, cap=2048, pairs=28_333)
    assert tokens(step) == {2: 1, 1: wanted}
    most = chunk_work(0, 2048, 28_333) - 28_333
    assert chunk_work(computed, wanted, 28_333) <= most
    assert wanted == 2047 or chunk_work(computed, wanted + 1, 28_333) > most


@pytest.mark.covers("S59")
def test_without_a_decode_or_without_counting_a_chunk_takes_the_whole_budget() -> None:
    long = prefilling(1, 109_000, 100_000)
    assert tokens(plan(running=[long], cap=2048, pairs=28_333)) == {1: 2048}
    step = plan(running=[long, decoding(2, 100)], cap=2048, pairs=0)
    assert tokens(step) == {2: 1, 1: 2047}


@pytest.mark.covers("S59")
def test_all_chunks_of_a_step_share_the_work_admissions_too() -> None:
    running = [prefilling(1, 101_000, 100_000), decoding(2, 100)]
    cached = {3: tuple(range(500)), 4: ()}
    queue = [waiting(3, 64 * 500 + 5000), waiting(4, 5000)]
    step = plan(running=running, queue=queue, cached=cached, cap=2048, pairs=28_333, threshold=300)
    assert tokens(step) == {2: 1, 1: 300, 3: 300, 4: 119}
    work = 28_333 + chunk_work(100_000, 300, 28_333) + chunk_work(32_000, 300, 28_333)
    assert work + chunk_work(0, 119, 28_333) <= chunk_work(0, 2048, 28_333)
    assert work + chunk_work(0, 120, 28_333) > chunk_work(0, 2048, 28_333)
    # The work is used up although tokens are left, so nobody else is seated.
    queue.append(waiting(5, 100))
    cached[5] = ()
    step = plan(running=running, queue=queue, cached=cached, cap=2048, pairs=28_333, threshold=300)
    assert admitted(step) == [3, 4]
    assert step.stopped_by is StopRule.NO_BUDGET


@pytest.mark.covers("S59")
@pytest.mark.parametrize("granularity", [1, 16, 64])
def test_prompts_get_on_however_much_the_attention_costs(granularity: int) -> None:
    running = [prefilling(1, 1 << 18, 1 << 17), *(decoding(i, 32) for i in range(2, 66))]
    step = plan(running=running, cap=128, pairs=1, granularity=granularity)
    assert tokens(step)[1] == max(64 // 8, granularity)
    assert step.num_decode_tokens == 64


@pytest.mark.covers("S59")
def test_the_part_that_prompts_get_anyway_is_shared_by_all_of_them() -> None:
    running = [prefilling(i, 1 << 18, 1 << 17) for i in (1, 2)]
    step = plan(running=[*running, decoding(3, 32)], cap=801, pairs=1, threshold=60)
    assert tokens(step) == {3: 1, 1: 60, 2: 40}


@pytest.mark.covers("S59")
def test_nobody_is_preempted_for_a_prompt_that_the_work_would_not_let_begin() -> None:
    # The running chunk takes more than all the work; a victim's one token does not make up for it.
    old = prefilling(1, 1 << 18, 1 << 17, priority=9)
    low = decoding(2, 100, priority=0)
    cached = {3: tuple(range(3))}
    step = plan(
        running=[old, low],
        queue=[waiting(3, 64 * 3 + 10, priority=5)],
        cached=cached,
        seats=2,
        cap=80,
        pairs=64,
        priorities=True,
    )
    assert victims(step) == []
    assert admitted(step) == []


@pytest.mark.covers("S59")
def test_the_work_of_a_victim_is_there_for_the_sequence_that_takes_its_place() -> None:
    low = [decoding(i, 100) for i in range(1, 61)]
    queue = [waiting(99, 9000, priority=5)]
    cached = {99: tuple(range(86))}
    step = plan(
        running=low, queue=queue, cached=cached, seats=60, cap=100, pairs=1000, priorities=True
    )
    assert len(victims(step)) == 1
    left = chunk_work(0, 100, 1000) - 60 * 1000
    assert left < chunk_work(86 * 64, 7, 1000) <= left + 1000
    assert tokens(step)[99] == 7


@pytest.mark.covers("S59")
def test_what_an_urgent_prompt_does_not_take_goes_to_running_ones_within_the_work() -> None:
    running = [prefilling(i, 90_000, 60_000) for i in (1, 2)]
    running += [decoding(3, 100)]
    queue = [waiting(4, 900, priority=5)]
    most = chunk_work(0, 2048, 28_333) - 28_333
    for threshold in (0, 500):
        step = plan(
            running=running,
            queue=queue,
            pool=0,
            cap=2048,
            pairs=28_333,
            priorities=True,
            threshold=threshold,
        )
        got = tokens(step)
        assert admitted(step) == []
        assert got[1] == min(threshold or 2048, 677)
        work = sum(chunk_work(60_000, got[i], 28_333) for i in (1, 2) if i in got)
        assert most - chunk_work(61_000, 1, 28_333) < work <= most
