"""Gathering pieces into frames, and counting them once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout, LayerShape
from kv_transfer.shared.block_arrays import as_blocks, run_lengths, runs_of
from kv_transfer.shared.chunks import PieceSet, PushedPieces, split_chunks
from kv_transfer.shared.limits import LEAST_BLOCKS_PER_FRAME, Limits

LAYOUT = KVLayout(
    model_digest="m", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
)
PAIR_BYTES = 2 * LAYOUT.piece_bytes


@pytest.mark.covers("F33")
@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ((), []),
        ((4,), [(4, 1)]),
        ((4, 5, 6), [(4, 3)]),
        ((4, 6, 7, 9), [(4, 1), (6, 2), (9, 1)]),
        ((6, 5, 4), [(6, 1), (5, 1), (4, 1)]),
        ((4, 4, 5), [(4, 1), (4, 2)]),
    ],
)
def test_neighbours_leave_as_one_range(
    blocks: tuple[int, ...], runs: list[tuple[int, int]]
) -> None:
    assert runs_of(blocks) == runs
    assert run_lengths(as_blocks(blocks)).tolist() == [count for _, count in runs]


@pytest.mark.parametrize("values", [[-1], [1 << 32], [0.5], ["1"], [None]])
def test_what_is_no_block_is_refused(values: list[Any]) -> None:
    with pytest.raises(ValueError, match="no numbers of blocks"):
        as_blocks(values)


def test_blocks_of_other_memory_are_in_chunks_of_their_own() -> None:
    blocks = as_blocks([12, 3, 9, 10, 11, 4])
    chunks = split_chunks(2, as_blocks(range(6)), blocks, max_blocks=2, num_pool_blocks=10)
    found = [(one.ordinals.tolist(), one.source_blocks.tolist()) for one in chunks]
    assert found == [([1, 5], [3, 4]), ([2], [9]), ([3, 4], [10, 11]), ([0], [12])]


def test_a_push_is_ordered_by_source_and_split() -> None:
    blocks = as_blocks([9, 5, 4, 6, 8])
    chunks = split_chunks(2, as_blocks(range(5)), blocks, max_blocks=3)
    found = [(one.layer, one.ordinals.tolist(), one.source_blocks.tolist()) for one in chunks]
    assert found == [(2, [2, 1, 3], [4, 5, 6]), (2, [4, 0], [8, 9])]
    assert [len(one) for one in chunks] == [3, 2]
    assert split_chunks(0, as_blocks([]), as_blocks([]), max_blocks=3) == []

    both = chunks[0].joined(chunks[1:])
    assert (both.ordinals.tolist(), both.source_blocks.tolist()) == (
        [2, 1, 3, 4, 0],
        [4, 5, 6, 8, 9],
    )


@pytest.mark.covers("F23")
def test_a_piece_counts_once() -> None:
    pieces = PieceSet(2, 3)
    added = [(0, [0]), (1, [2]), (1, [2]), (0, [2, 0, 1]), (1, [0]), (1, [])]
    new = [pieces.add(layer, as_blocks(ordinals)).tolist() for layer, ordinals in added]
    assert new == [[True], [True], [False], [True, False, True], [True], []]
    assert (pieces.count, pieces.has_first(3)) == (5, False)
    assert pieces.has_all(1, as_blocks([2, 0]))
    assert not pieces.has_all(1, as_blocks([2, 1]))
    assert [pieces.has_first(num_blocks) for num_blocks in range(4)] == [True, True, False, False]
    pieces.add(1, as_blocks([1]))
    assert (pieces.count, pieces.has_first(3)) == (6, True)
    pieces.discard(1, as_blocks([1, 2]))
    pieces.discard(1, as_blocks([1]))
    assert (pieces.count, pieces.has_first(3)) == (4, False)
    assert not pieces.has_all(1, as_blocks([2]))


def test_of_a_piece_that_is_pushed_twice_the_first_source_counts() -> None:
    pushed = PushedPieces(2, 5)
    new = [
        pushed.add(1, as_blocks(ordinals), as_blocks(blocks)).tolist()
        for ordinals, blocks in [([3, 1, 3], [7, 0, 9]), ([0, 1, 2], [4, 5, 6]), ([], [])]
    ]
    assert new == [[0, 1], [0, 2], []]
    assert [pushed.source_of(1, ordinal) for ordinal in range(6)] == [4, 0, 6, 7, None, None]
    assert (pushed.source_of(0, 3), pushed.source_of(2, 0), pushed.count) == (None, None, 4)


@pytest.mark.parametrize(
    ("window", "frame", "blocks"),
    [(1, 8, 1), (2, 8, 1), (5, 8, 2), (100, 8, 8), (10_000, 10_000, LEAST_BLOCKS_PER_FRAME)],
)
def test_a_frame_is_at_most_half_a_window(window: int, frame: int, blocks: int) -> None:
    limits = Limits(window_bytes=window * PAIR_BYTES, max_frame_bytes=frame * PAIR_BYTES)
    assert limits.blocks_per_chunk(LAYOUT) == (blocks,) * LAYOUT.num_layers


def test_a_frame_holds_fewer_blocks_of_larger_layers() -> None:
    layout = KVLayout.of_layers(
        (LayerShape(2, 1, 8), LayerShape(1, 1, 64), LayerShape(1, 1, 8)),
        model_digest="m",
        block_size=4,
        dtype="float16",
    )
    assert [layer.num_bytes for layer in layout.layers] == [128, 512, 64]
    limits = Limits(window_bytes=2048)
    assert limits.blocks_per_chunk(layout) == (8, 2, 16)
    with pytest.raises(ConfigError, match="511 bytes: wanted at least 512"):
        Limits(window_bytes=511).blocks_per_chunk(layout)
    assert limits.max_part_bytes(layout) == limits.max_joined * limits.max_frame_bytes


@pytest.mark.covers("F31")
def test_a_window_too_small_for_a_block_names_both() -> None:
    with pytest.raises(ConfigError, match=f"{PAIR_BYTES - 1} bytes: wanted at least {PAIR_BYTES}"):
        Limits(window_bytes=PAIR_BYTES - 1).blocks_per_chunk(LAYOUT)


def test_a_piece_larger_than_a_frame_still_fits_a_part() -> None:
    large = dataclasses.replace(LAYOUT, head_dim=1 << 18)
    assert Limits(window_bytes=1 << 30).max_part_bytes(large) == large.piece_bytes
