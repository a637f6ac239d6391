"""Which steps are measured, in which order, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.core.runner_contract import ScheduledSequence
from pdserve.profiling.step_times import MOST_REPEATS, StepBounds, StepTimer

BOUNDS = StepBounds(
    max_tokens=512,
    max_len=2048,
    num_blocks=300,
    block_size=16,
    max_rows=16,
    most_touched=10**6,
    vocab_size=32_000,
)


class Machine:
    """A clock, and steps that take a second for each token; the first of each size takes two."""

    def __init__(self, token_s: float = 1.0) -> None:
        self.now_s = 0.0
        self.batches: list[list[ScheduledSequence]] = []
        self.lines: list[str] = []
        self._token_s = token_s
        self._seen: set[tuple[int, int]] = set()

    def execute(self, batch: Sequence[ScheduledSequence]) -> None:
        num_tokens = sum(len(one.token_ids) for one in batch)
        size = num_tokens, batch[0].start
        self.now_s += self._token_s * num_tokens * (1 if size in self._seen else 2)
        self._seen.add(size)
        self.batches.append(list(batch))

    def timer(self, bounds: StepBounds = BOUNDS) -> StepTimer:
        return StepTimer(self.execute, bounds, self.lines.append, clock=lambda: self.now_s)


def test_decodes_are_measured_by_rows_and_context() -> None:
    machine = Machine()
    found = machine.timer().decodes(1e9)
    # 300 blocks of 16 tokens hold 16 sequences of 129 tokens, and 4 of 1,025.
    assert [(one.rows, one.context) for one in found] == [
        *((rows, context) for rows in (1, 2, 4) for context in (128, 1024)),
        (8, 128),
        (16, 128),
    ]
    assert [one.step_s for one in found] == [one.rows for one in found], "the least of some"
    assert len(machine.batches) == len(found) * MOST_REPEATS
    assert machine.lines[0].startswith("decode of 1 rows at 128 tokens and more, for 1e+09 s")
    assert machine.lines[1:] == [
        f"decode of {one.rows} rows at {one.context} tokens: {1e3 * one.rows:.2f} ms"
        for one in found
    ], "the times that are kept"
    for batch in machine.batches:
        blocks = [block for one in batch for block in one.block_table]
        assert len(set(blocks)) == len(blocks), "sequences share no block"
        assert max(blocks) < BOUNDS.num_blocks


def test_no_two_tokens_of_a_step_are_equal() -> None:
    """Equal ones would be sent to the same experts of a mixture, and wide steps seem cheap."""
    machine = Machine()
    timer = machine.timer()
    timer.decodes(1e9)
    timer.chunks(1e9)
    timer.verified(4, 1e9)
    for batch in machine.batches:
        tokens = [token for one in batch for token in one.token_ids]
        assert len(set(tokens)) == len(tokens)
        assert max(tokens) < BOUNDS.vocab_size


def test_chunks_are_measured_by_tokens_and_context() -> None:
    machine = Machine()
    found = machine.timer().chunks(1e9)
    chunks = (16, 64, 256, 512)
    assert [(one.tokens, one.context) for one in found] == [
        (tokens, context) for tokens in chunks for context in (0, 1024)
    ]
    assert [one.step_s for one in found] == [one.tokens for one in found]
    assert all(batch[0].sample is None for batch in machine.batches)


def test_verified_drafts_are_measured_where_there_are_any() -> None:
    machine = Machine()
    assert machine.timer().verified(1, 1e9) == ()
    found = machine.timer().verified(4, 1e9)
    assert [(one.sequences, one.tokens_per_sequence) for one in found] == [(1, 4), (4, 4), (16, 4)]
    assert all(one.num_drafts == 3 for batch in machine.batches for one in batch)


@pytest.mark.parametrize("budget_s", [0.0, 5.0, 100.0])
def test_it_ends_in_time_and_has_at_least_one_point(budget_s: float) -> None:
    """No step begins after the end of the budget, but for the first one."""
    machine = Machine()
    found = machine.timer().chunks(budget_s)
    assert found
    last_s = 2.0 * max(one.tokens for one in found)
    assert machine.now_s <= budget_s + last_s
    assert "left out, the time is up" in machine.lines[1]


def test_in_the_smallest_pool_there_is_something_to_measure() -> None:
    """A chunk of 16 tokens always fits; a decode as far as the pool goes."""
    small = replace(BOUNDS, max_tokens=16, max_len=100, num_blocks=8, max_rows=1)
    assert [one.tokens for one in Machine().timer(small).chunks(1.0)] == [16]
    assert [one.context for one in Machine().timer(small).decodes(1.0)] == [99]
    assert Machine().timer(small).verified(4, 1.0) == ()


def test_of_a_large_pool_no_more_is_touched_than_is_needed_to_miss_the_caches() -> None:
    machine = Machine()
    found = machine.timer(replace(BOUNDS, most_touched=100)).decodes(1e9)
    assert [(one.rows, one.context) for one in found][-2:] == [(8, 128), (16, 128)]
    used = [[block for one in batch for block in one.block_table] for batch in machine.batches]
    assert {max(blocks) for blocks in used} > {99}
    assert max(max(blocks) for blocks in used) == 99
    assert len(used[-1]) == 16 * 9, "more than that many, some of them shared"
