"""How a step's rows lie on a card: sequences of few rows for a graph, or chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.runner.flat_batch import FlatBatch
from engine.runner.gpu.steps.step_rows import NO_ROW, DecodeRoom, StepRows, lay_out, rows_at

BLOCK = 16
ROOM = DecodeRoom(32, {1: (4, 8), 2: (4, 8), 4: (3, 4)})


def laid_out(counts: Sequence[int], ends: Sequence[int], *, is_sampled: bool = True) -> StepRows:
    """Lay out sequences with so many rows that end before these positions.

    Row r of the batch has token 100 + r and slot 1000 + r; sequence s has block table [s, s + 10].
    """
    num_rows = sum(counts)
    positions = [np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
    rows, seqs = np.arange(num_rows), np.arange(len(counts))
    flat = FlatBatch(
        100 + rows, np.concatenate(positions), 1000 + rows, np.cumsum([0, *counts]),
        np.stack([seqs, seqs + 10], axis=1), rows if is_sampled else rows[:1],
    )  # fmt: skip
    return lay_out(flat, 8, ROOM)


def test_padding_stands_before_the_rows_of_a_sequence() -> None:
    rows = laid_out([3, 1, 4], [20, 9, 30])
    assert (rows.rows_each, rows.num_singles, rows.chunks) == (4, 3, None)
    assert rows.tokens.tolist() == [0, 100, 101, 102, 0, 0, 0, 103, 104, 105, 106, 107]
    assert rows.positions.tolist() == [-1, 17, 18, 19, -1, -1, -1, 8, 26, 27, 28, 29]
    assert rows.slots[[0, 1, 7, 11]].tolist() == [NO_ROW, 1000, 1003, 1007]
    assert rows.last_positions.tolist() == [19, 8, 29]
    assert rows.single_tables.tolist() == [[0, 10], [1, 11], [2, 12]]
    assert rows.places is not None
    assert rows.places.tolist() == [1, 2, 3, 7, 8, 9, 10, 11]
    assert rows_at(rows.places, rows.count).tolist() == [0, 0, 1, 2, 0, 0, 0, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("counts", "rows_each"), [([1, 1], 1), ([2, 1], 2), ([3, 1], 4)])
def test_sequences_have_as_many_rows_as_the_next_graph(counts: list[int], rows_each: int) -> None:
    rows = laid_out(counts, [20, 9])
    assert (rows.rows_each, rows.count) == (rows_each, 2 * rows_each)
    assert (rows.places is None) == (rows_each == 1)


@pytest.mark.parametrize(
    ("counts", "ends"),
    [([5], [20]), ([3] * 4, [20] * 4), ([3, 3], [96, 65])],
    ids=["more rows than a graph has", "more sequences", "more pieces"],
)
def test_without_room_they_are_chunks(counts: list[int], ends: list[int]) -> None:
    rows = laid_out(counts, ends)
    assert rows.chunks is not None
    assert rows.chunks.num_rows.tolist() == counts
    assert rows.tokens.tolist() == (100 + np.arange(sum(counts))).tolist()


def test_one_piece_less_is_a_graph() -> None:
    assert laid_out([3, 3], [96, 32]).chunks is None


def test_rows_of_a_prompt_are_a_chunk() -> None:
    rows = laid_out([3, 1], [20, 9], is_sampled=False)
    assert rows.chunks is not None
    assert rows.chunks.num_rows.tolist() == [3]
    assert rows.tokens.tolist() == [103, 100, 101, 102]


WINDOWED = DecodeRoom(32, {1: (4, 4), 4: (3, 4)}, window=40)


@pytest.mark.parametrize(
    ("rows_each", "last", "num_pieces"),
    [(1, 0, 1), (1, 31, 1), (1, 39, 2), (1, 70, 3), (1, 71, 2), (1, 1000, 2), (4, 71, 3),
     (4, 73, 3), (4, 74, 2), (1, 100 * 32 + 31, 2)],
)  # fmt: skip
def test_pieces_before_the_windows_of_all_rows_are_not_counted(
    rows_each: int, last: int, num_pieces: int
) -> None:
    seen = range(max(last - (rows_each - 1) - 39, 0), last + 1)
    assert num_pieces == len({key // 32 for key in seen})
    assert WINDOWED.num_pieces(rows_each, np.array([last])).tolist() == [num_pieces]


def test_long_texts_with_a_window_have_room_where_those_without_have_none() -> None:
    lasts = np.array([3231, 3231])
    assert WINDOWED.rows_each(1, lasts) == 1
    assert DecodeRoom(32, WINDOWED.most).rows_each(1, lasts) is None
    assert WINDOWED.rows_each(1, np.array([3232, 3231])) is None  # three pieces and two
