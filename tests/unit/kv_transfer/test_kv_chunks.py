"""Gathering pieces into frames, and counting them once."""

from __future__ import annotations

import dataclasses

import pytest

from common.errors import ConfigError
from common.kv_layout import KVLayout
from kv_transfer.core.chunks import Chunk, PieceSet, runs_of, split_chunks
from kv_transfer.core.limits import MAX_BLOCKS_PER_FRAME, Limits

LAYOUT = KVLayout(
    model_digest="m", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
)
PAIR_BYTES = 2 * LAYOUT.piece_bytes


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ((), ()),
        ((4,), ((4, 1),)),
        ((4, 5, 6), ((4, 3),)),
        ((4, 6, 7, 9), ((4, 1), (6, 2), (9, 1))),
        ((6, 5, 4), ((6, 1), (5, 1), (4, 1))),
    ],
)
def test_neighbours_leave_as_one_range(
    blocks: tuple[int, ...], runs: tuple[tuple[int, int], ...]
) -> None:
    """F33."""
    assert runs_of(blocks) == runs


def test_a_push_is_ordered_by_source_and_split() -> None:
    chunks = split_chunks(2, [0, 1, 2, 3, 4], [9, 5, 4, 6, 8], max_blocks=3)
    assert chunks == [Chunk(2, (2, 1, 3), (4, 5, 6)), Chunk(2, (4, 0), (8, 9))]
    assert [chunk.runs for chunk in chunks] == [((4, 3),), ((8, 2),)]
    assert split_chunks(0, [], [], max_blocks=3) == []


def test_a_piece_counts_once() -> None:
    """F23."""
    pieces = PieceSet(2, 3)
    for layer, ordinal in [(0, 0), (1, 2), (1, 2), (0, 1), (0, 2), (1, 0), (1, 0)]:
        pieces.add(layer, ordinal)
    assert (pieces.count, pieces.is_full) == (5, False)
    assert pieces.has(1, 2)
    assert not pieces.has(1, 1)
    pieces.add(1, 1)
    assert (pieces.count, pieces.is_full) == (6, True)


@pytest.mark.parametrize(
    ("window", "frame", "blocks"),
    [(1, 8, 1), (2, 8, 1), (5, 8, 2), (100, 8, 8), (10_000, 10_000, MAX_BLOCKS_PER_FRAME)],
)
def test_a_frame_is_at_most_half_a_window(window: int, frame: int, blocks: int) -> None:
    limits = Limits(window_bytes=window * PAIR_BYTES, max_frame_bytes=frame * PAIR_BYTES)
    assert limits.blocks_per_frame(LAYOUT) == blocks


def test_a_window_too_small_for_a_block_names_both() -> None:
    """F31."""
    with pytest.raises(ConfigError, match=f"{PAIR_BYTES - 1} bytes: wanted at least {PAIR_BYTES}"):
        Limits(window_bytes=PAIR_BYTES - 1).blocks_per_frame(LAYOUT)


def test_a_piece_larger_than_a_frame_still_fits_a_part() -> None:
    large = dataclasses.replace(LAYOUT, head_dim=1 << 18)
    assert Limits(window_bytes=1 << 30).max_part_bytes(large) == large.piece_bytes
