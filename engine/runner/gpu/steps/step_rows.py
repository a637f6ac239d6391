"""The order of a step's rows on the card: sequences of few rows first, then chunks of the others.

Attention of a few rows is computed in pieces by many programs, and that of more rows by one program
a tile. Both give a row the same bits, so the choice is a question of speed.

A step that decodes has no chunks: its sequences have one row each, or as many as the one with the
most drafts, up to a number for which there is a graph. Padding comes before a sequence's rows, so
that its last row is the last one:

    rows_each 4      place 0  1  2  3 │ 4  5  6  7 │ 8  9 10 11
    3, 1 and 4 rows        ·  0  1  2 │ ·  ·  ·  3 │ 4  5  6  7
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.runner.flat_batch import FlatBatch

NO_ROW = -1
"""The position and the slot of a row of padding: it writes nothing."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences of several rows: chunk c has `num_rows[c]` from `first_rows[c]` on.

    `tables` is `[chunks, blocks]`; tile t holds the rows from `tile_rows[t]` on of chunk
    `tile_chunks[t]`.
    """

    first_rows: np.ndarray
    num_rows: np.ndarray
    last_positions: np.ndarray
    tables: np.ndarray
    tile_chunks: np.ndarray
    tile_rows: np.ndarray


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's numbers, in the order of its rows on the card.

    `places[r]` is the index on the card of row r of the batch; None: they are equal. The first
    `num_singles` sequences have `rows_each` rows each, padding included, which is one if there are
    `chunks` too, and the block tables `single_tables` `[num_singles, blocks]`. `chunks` None: there
    are no other sequences. Where `sources[r]` is not NO_ROW, row r's token is the one drawn in that
    row of the step before; None: all are `tokens`.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    num_singles: int
    single_tables: np.ndarray
    places: np.ndarray | None = None
    chunks: Chunks | None = None
    sources: np.ndarray | None = None
    rows_each: int = 1

    @property
    def count(self) -> int:
        """Rows of the step, with the padding of its sequences."""
        return len(self.tokens)

    @property
    def last_positions(self) -> np.ndarray:
        """The last position of each sequence, where there are no chunks."""
        return self.positions[self.rows_each - 1 :: self.rows_each]


@dataclass(frozen=True, slots=True)
class DecodeRoom:
    """The largest steps without chunks, by the number of rows of each sequence, ascending.

    `most[rows_each]` are the most sequences, and the most pieces of `piece` keys. `window` is the
    longest one, if all layers have one; 0: rows attend to all keys.
    """

    piece: int
    most: Mapping[int, tuple[int, int]]
    window: int = 0

    def num_pieces(self, rows_each: int, last_positions: np.ndarray) -> np.ndarray:
        """Return the pieces that `rows_each` rows see which end at each of these positions."""
        found: np.ndarray = last_positions // self.piece + 1
        if self.window:
            first_seen = last_positions - (rows_each - 1) - (self.window - 1)
            found -= np.maximum(first_seen, 0) // self.piece
        return found

    def rows_each(self, least: int, last_positions: np.ndarray) -> int | None:
        """Return the rows, at least `least`, of each of the sequences that end at these positions.

        None: the sequences are too many, or too long.
        """
        for rows_each, (most_sequences, most_pieces) in self.most.items():
            if rows_each >= least:
                num_pieces = self.num_pieces(rows_each, last_positions).sum()
                is_room = len(last_positions) <= most_sequences and num_pieces <= most_pieces
                return rows_each if is_room else None
        return None


def rows_at(places: np.ndarray, count: int) -> np.ndarray:
    """Return the row at each of `count` indices on the card; row 0 for padding."""
    found = np.zeros(count, np.int64)
    found[places] = np.arange(len(places))
    return found


def lay_out(batch: FlatBatch, tile: int, room: DecodeRoom) -> StepRows:
    """Lay out a step; tiles of chunks have `tile` rows.

    A step in which a token is drawn after every row has no chunks, if there is room. Otherwise
    sequences of one row count as chunks as soon as there is no room for their pieces beside those
    of the sequences before.
    """
    num_rows, num_seqs = len(batch.token_ids), len(batch.row_starts) - 1
    if num_rows == num_seqs and room.rows_each(1, batch.positions) == 1:
        return StepRows(batch.token_ids, batch.positions, batch.slots, num_rows, batch.block_tables)
    counts = np.diff(batch.row_starts)
    if len(batch.sampled_rows) == num_rows:
        lasts = batch.positions[batch.row_starts[1:] - 1]
        rows_each = room.rows_each(int(counts.max()), lasts)
        if rows_each is not None:
            return _with_drafts(batch, counts, rows_each)
    starts = batch.row_starts[:-1]
    num_pieces = np.where(counts == 1, room.num_pieces(1, batch.positions[starts]), 0)
    is_single = (counts == 1) & (np.cumsum(num_pieces) <= room.most[1][1])
    singles, chunks = np.flatnonzero(is_single), np.flatnonzero(~is_single)
    chunk_counts = counts[chunks]
    first_rows = len(singles) + np.cumsum(chunk_counts) - chunk_counts
    # Rows of the batch in the order of the card: singles, then chunk after chunk.
    within = np.arange(chunk_counts.sum()) - np.repeat(first_rows - len(singles), chunk_counts)
    order = np.concatenate([starts[singles], np.repeat(starts[chunks], chunk_counts) + within])
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    last_positions = batch.positions[batch.row_starts[1:][chunks] - 1]
    tile_chunks, tile_rows = _tiles(chunk_counts, last_positions, tile)
    return StepRows(
        tokens=batch.token_ids[order],
        positions=batch.positions[order],
        slots=batch.slots[order],
        num_singles=len(singles),
        single_tables=batch.block_tables[singles],
        places=places,
        chunks=Chunks(
            first_rows=first_rows,
            num_rows=chunk_counts,
            last_positions=last_positions,
            tables=batch.block_tables[chunks],
            tile_chunks=tile_chunks,
            tile_rows=tile_rows,
        ),
    )


def _with_drafts(batch: FlatBatch, counts: np.ndarray, rows_each: int) -> StepRows:
    """Lay out sequences of `counts` rows, each of which gets `rows_each`."""
    num_rows, num_seqs = len(batch.token_ids), len(counts)
    ends = rows_each * np.arange(1, num_seqs + 1)
    places = np.arange(num_rows) + np.repeat(ends - batch.row_starts[1:], counts)

    def spread(values: np.ndarray, padding: int) -> np.ndarray:
        found = np.full(num_seqs * rows_each, padding, np.int64)
        found[places] = values
        return found

    return StepRows(
        tokens=spread(batch.token_ids, 0),
        positions=spread(batch.positions, NO_ROW),
        slots=spread(batch.slots, NO_ROW),
        num_singles=num_seqs,
        single_tables=batch.block_tables,
        places=places,
        rows_each=rows_each,
    )


def _tiles(counts: np.ndarray, lasts: np.ndarray, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Return chunk and first row of each tile, those with the most keys first.

    The longest tiles start first, so that none of them runs alone at the end.
    """
    per_chunk = -(-counts // tile)
    chunks = np.repeat(np.arange(len(counts)), per_chunk)
    rows = np.arange(per_chunk.sum()) - np.repeat(np.cumsum(per_chunk) - per_chunk, per_chunk)
    rows *= tile
    num_keys = lasts[chunks] - counts[chunks] + rows
    order = np.argsort(-num_keys, kind="stable")
    return chunks[order], rows[order]
