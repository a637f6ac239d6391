"""Blocks that a step adds to a table: the examples of the specification and the upstream slips."""

from __future__ import annotations

import pytest

from common.kv.blocks import blocks_for
from engine.core.planning.decode_plan import new_blocks
from tests.support.engine.policy_views import BLOCK_SIZE


@pytest.mark.covers("E25", "E26")
@pytest.mark.parametrize(
    ("num_computed", "num_tokens", "num_held", "expected"),
    [
        pytest.param(0, 100, 0, 2, id="E25"),
        pytest.param(100, 1, 2, 0, id="E26"),
        pytest.param(4000, 1, 65, 0, id="E27"),
        pytest.param(63, 1, 1, 0, id="last slot of a block"),
        pytest.param(64, 1, 1, 1, id="first slot of the next block"),
        pytest.param(0, 0, 0, 0, id="nothing"),
    ],
)
def test_new_blocks_without_speculation(
    num_computed: int, num_tokens: int, num_held: int, expected: int
) -> None:
    assert new_blocks(num_computed, num_tokens, 0, num_held, BLOCK_SIZE) == expected


@pytest.mark.covers("C19", "E27")
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_table_that_is_longer_than_needed_needs_nothing(lookahead: int) -> None:
    upstream = blocks_for(4000 + 1, BLOCK_SIZE) - 65
    assert (upstream, upstream + 1, max(upstream, 0) + 1) == (-2, -1, 1)
    assert new_blocks(4000, 1, lookahead, 65, BLOCK_SIZE) == 0


def chunk_tables(num_tokens: int, *, is_upstream: bool) -> list[int]:
    """How long the table is after each of four chunks, with one draft behind the last."""
    lengths = [0]
    for chunk in range(4):
        if is_upstream:
            missing = blocks_for((chunk + 1) * num_tokens, BLOCK_SIZE) - lengths[-1]
            added = max(missing, 0) + 1
        else:
            lookahead = 1 if chunk == 3 else 0
            added = new_blocks(chunk * num_tokens, num_tokens, lookahead, lengths[-1], BLOCK_SIZE)
        lengths.append(lengths[-1] + added)
    return lengths[1:]


@pytest.mark.covers("C18", "E28", "S18")
def test_lookahead_once_in_tokens() -> None:
    assert chunk_tables(16, is_upstream=False) == [1, 1, 1, 2]
    assert chunk_tables(16, is_upstream=True) == [2, 3, 4, 5]
    assert chunk_tables(64, is_upstream=False) == [1, 2, 3, 5]
    assert chunk_tables(64, is_upstream=True) == [2, 3, 4, 5]


@pytest.mark.covers("E29")
@pytest.mark.parametrize(
    ("block_size", "thresholds"),
    [(64, (12, 24, 36, 48, 60, 72)), (16, (12, 24, 31, 31, 31, 31))],
    ids=["E29", "E29 small blocks"],
)
def test_a_table_grows_when_the_step_needs_a_slot_and_not_before(
    block_size: int, thresholds: tuple[int, ...]
) -> None:
    for num_drafts, threshold in enumerate(thresholds):
        upstream = 12 if num_drafts == 0 else min(12 * (num_drafts + 1), 2 * block_size - 1)
        assert upstream == threshold
        for num_free in range(threshold + 1):
            num_computed = 4 * block_size - num_free
            added = new_blocks(num_computed, 1, num_drafts, 4, block_size)
            assert added == (1 if num_free < 1 + num_drafts else 0)
