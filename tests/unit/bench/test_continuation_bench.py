"""What bench.continuation counts as a stall."""

from __future__ import annotations

from bench.continuation import CASES, FIRST_TOKENS, NUM_TOKENS, stalls_s


def test_only_gaps_that_end_after_the_kill_count() -> None:
    killed_at_s = 10.0
    streams = [[1.0, 6.0, 9.5, 12.0, 12.5], [9.0, 10.5, 13.0], [1.0, 9.0]]
    assert stalls_s(streams, killed_at_s) == [2.5, 2.5, 0.0]


def test_every_stream_has_its_place_before_the_kill() -> None:
    assert all(NUM_TOKENS - num_prompt > FIRST_TOKENS for num_prompt in CASES.values())
