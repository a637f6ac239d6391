"""How a step's rows lie on the card: sequences of one row first, then the chunks of the others.

Attention of a single row is computed in pieces by many programs, and that of more rows by one
program a tile. Both give a row the same bits, so which way a row goes is a question of speed.
"""

from __future__ import annotations

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
    """A step's numbers in the order in which its rows lie on the card.

    `places[r]` is where row r of the batch lies; None: where it is in the batch. The first
    `num_singles` rows are sequences of one row each, with `single_tables` `[num_singles, blocks]`.
    `chunks` None: there are no others. Where `sources[r]` is not NO_ROW, row r's token is the one
    that was drawn in that row of the step before; None: all are `tokens`.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    num_singles: int
    single_tables: np.ndarray
    places: np.ndarray | None = None
    chunks: Chunks | None = None
    sources: np.ndarray | None = None

    @property
    def count(self) -> int:
        """Rows of the step."""
        return len(self.tokens)


def lay_out(batch: FlatBatch, tile: int, piece: int, most_pieces: int) -> StepRows:
    """Lay out a step; tiles of chunks have `tile` rows.

    Sequences of one row count as chunks as soon as there is no room for their pieces of `piece`
    keys beside those of the sequences before.
    """
    num_rows, num_seqs = len(batch.token_ids), len(batch.row_starts) - 1
    if num_rows == num_seqs and (batch.positions // piece + 1).sum() <= most_pieces:
        return StepRows(batch.token_ids, batch.positions, batch.slots, num_rows, batch.block_tables)
    counts = np.diff(batch.row_starts)
    starts = batch.row_starts[:-1]
    num_pieces = np.where(counts == 1, batch.positions[starts] // piece + 1, 0)
    is_single = (counts == 1) & (np.cumsum(num_pieces) <= most_pieces)
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
