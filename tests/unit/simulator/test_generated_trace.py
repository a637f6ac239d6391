"""Made-up conversations: sorted, repeatable, and each prompt begins with what came before it."""

from __future__ import annotations

from itertools import pairwise

from simulator.generated_trace import LONGEST_ANSWER, LONGEST_PROMPT, generated_trace
from simulator.shared_pool import num_found_tokens
from simulator.trace_file import TOKENS_PER_HASH_ID, TraceRequest

REQUESTS = generated_trace(3000, 3.4, seed=1)


def test_requests_are_as_many_as_asked_for_in_order_and_within_the_bounds() -> None:
    assert len(REQUESTS) == 3000
    assert REQUESTS[0].arrival_s == 0.0
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(REQUESTS))
    for one in REQUESTS:
        assert TOKENS_PER_HASH_ID < one.num_prompt <= LONGEST_PROMPT
        assert 1 <= one.num_output <= LONGEST_ANSWER
        assert len(one.hash_ids) == -(-one.num_prompt // TOKENS_PER_HASH_ID)
        assert one.hash_ids[0] == 0
        assert len(set(one.hash_ids)) == len(one.hash_ids)


def test_the_means_come_near_those_of_the_published_hour() -> None:
    """12,035 tokens, 343 tokens, 37 % found, 3.4 requests a second."""
    prompts = sum(one.num_prompt for one in REQUESTS)
    assert 10_500 < prompts / 3000 < 13_500
    assert 300 < sum(one.num_output for one in REQUESTS) / 3000 < 390
    assert 0.33 < num_found_tokens(REQUESTS, 10**12, 64) / prompts < 0.44
    assert 3.0 < 3000 / REQUESTS[-1].arrival_s < 3.8


def test_a_turn_begins_with_the_full_blocks_of_the_one_before_and_a_block_that_grew_is_new() -> (
    None
):
    by_first: dict[int, list[TraceRequest]] = {}
    for one in REQUESTS:
        if len(one.hash_ids) > 1:
            by_first.setdefault(one.hash_ids[1], []).append(one)
    talks = [turns for turns in by_first.values() if len(turns) > 1]
    assert len(talks) > 300
    for turns in talks:
        for before, after in pairwise(turns):
            num_full = before.num_prompt // TOKENS_PER_HASH_ID
            assert after.num_prompt > before.num_prompt + before.num_output
            assert before.hash_ids[:num_full] == after.hash_ids[:num_full]
            assert set(before.hash_ids[num_full:]).isdisjoint(after.hash_ids)


def test_a_seed_decides_and_a_longer_trace_begins_with_the_shorter_one() -> None:
    assert generated_trace(50, 3.4, seed=1) == REQUESTS[:50]
    assert generated_trace(50, 3.4, seed=2) != REQUESTS[:50]
