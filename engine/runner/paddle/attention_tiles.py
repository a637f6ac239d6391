"""Which rows attend to which tiles of keys: the plan of one step's attention, made once per step.

An *item* is a tile of rows of one sequence. Short runs (decoding and the rows that verify drafts)
have one row per item, so such a row is computed with the same shapes with and without drafts. All
items are attended together, one tile of keys after the other, in groups that limit memory. The
tiles' borders depend on positions alone, so a row's sums have the same order in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from common.kv.blocks import blocks_for
from engine.runner.flat_batch import FlatBatch

SHORT_RUN = 16
"""The most rows of a sequence that are attended row by row."""
CHUNK_ROWS = 64
"""Rows of a longer run that are attended together."""
_FIRST_TILE, _LARGEST_TILE = 128, 1024
"""Tiles double in size: short sequences gather little, long ones need few operators."""


@dataclass(frozen=True, slots=True)
class BlockTile:
    """Blocks `first` to `end`, exclusive, of each table, for the first `num_items` items.

    `has_hidden`: some rows must not see some of its keys, which are after them or before their
    window. `has_unwritten`: some keys are after the last row of an item, where a slot may hold
    anything.
    """

    first: int
    end: int
    num_items: int
    has_hidden: bool
    has_unwritten: bool


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Items of one shape, longest first, as int64 arrays.

    `rows` `[items, rows]` are rows of the batch; an item with fewer repeats its last one.
    `positions` are theirs. `tables` `[items, blocks]` reach to the end of the last tile.
    """

    rows: np.ndarray
    positions: np.ndarray
    tables: np.ndarray
    tiles: tuple[BlockTile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLimits:
    """Sizes that decide how many items are attended together.

    `kv_width` is kv_heads * head_dim. Gathered keys, values and scores of one tile have at most
    `max_elements` elements, unless a single item has more. A row attends to the last `window`
    positions up to its own, 0: to all. Tiles that none of a group's rows see are left out; what a
    row finds in one that it does not see has no weight.
    """

    block_size: int
    num_heads: int
    kv_width: int
    max_elements: int = 1 << 25
    window: int = 0


def is_short_run(batch: FlatBatch) -> np.ndarray:
    """Return for each sequence whether it is attended row by row."""
    return np.asarray(np.diff(batch.row_starts) <= SHORT_RUN)


def rows_of(batch: FlatBatch, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of these sequences, and which sequence each of them belongs to."""
    counts = np.diff(batch.row_starts)[sequences]
    owners = np.repeat(sequences, counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return batch.row_starts[owners] + np.arange(len(owners)) - before, owners


def plan_tiles(batch: FlatBatch, sequences: np.ndarray, limits: TileLimits) -> list[TileGroup]:
    """Return groups that together cover every row of these sequences."""
    is_short = is_short_run(batch)[sequences]
    groups: list[TileGroup] = []
    rows, owners = rows_of(batch, sequences[is_short])
    if len(rows):
        groups += _groups(batch, rows[:, None], owners, limits)
    chunks = [
        (index, first, int(batch.row_starts[index + 1]))
        for index in sequences[~is_short]
        for first in range(batch.row_starts[index], batch.row_starts[index + 1], CHUNK_ROWS)
    ]
    if chunks:
        owners, firsts, ends = np.array(chunks).T
        tiles = np.minimum(firsts[:, None] + np.arange(CHUNK_ROWS), ends[:, None] - 1)
        groups += _groups(batch, tiles, owners, limits)
    return groups


def _groups(
    batch: FlatBatch, rows: np.ndarray, owners: np.ndarray, limits: TileLimits
) -> Iterator[TileGroup]:
    """Yield groups of the items `rows` `[items, rows]`, which belong to sequences `owners`."""
    size = limits.block_size
    positions = batch.positions[rows]
    ends = _tile_ends(int(positions.max()) + 1, size)
    num_tiles = np.searchsorted(ends * size, positions[:, -1], side="right") + 1
    order = np.argsort(-positions[:, -1], kind="stable")
    widths = np.diff(ends, prepend=0)
    at = 0
    while at < len(order):
        most = int(num_tiles[order[at]])
        keys = int(widths[:most].max()) * size
        each = keys * (2 * limits.kv_width + rows.shape[1] * limits.num_heads)
        chosen = order[at : at + max(1, limits.max_elements // each)]
        at += len(chosen)
        tables = _tables(batch.block_tables[owners[chosen]], int(ends[most - 1]))
        yield TileGroup(
            rows[chosen],
            positions[chosen],
            tables,
            tuple(_tiles(ends[:most], num_tiles[chosen], positions[chosen], limits)),
        )


def _tile_ends(num_keys: int, block_size: int) -> np.ndarray:
    """Return the block behind each tile, until `num_keys` keys are covered."""
    ends = [blocks_for(_FIRST_TILE, block_size)]
    while ends[-1] * block_size < num_keys:
        end = ends[-1] * block_size
        ends.append(blocks_for(end + min(end, _LARGEST_TILE), block_size))
    return np.array(ends)


def _tiles(
    ends: np.ndarray, num_tiles: np.ndarray, positions: np.ndarray, limits: TileLimits
) -> Iterator[BlockTile]:
    first = 0
    for index, end in enumerate(ends.tolist()):
        num_items = int((num_tiles > index).sum())
        active, last_key = positions[:num_items], end * limits.block_size - 1
        first_seen = active - limits.window + 1 if limits.window else np.zeros_like(active)
        if last_key >= first_seen.min():
            is_behind = first_seen.max() > first * limits.block_size
            yield BlockTile(
                first,
                end,
                num_items,
                has_hidden=bool(active.min() < last_key or is_behind),
                has_unwritten=bool(active[:, -1].min() < last_key),
            )
        first = end


def _tables(tables: np.ndarray, width: int) -> np.ndarray:
    """Return tables of exactly `width` blocks; block 0 stands for blocks that nobody reads."""
    if tables.shape[1] >= width:
        return tables[:, :width]
    return np.pad(tables, ((0, 0), (0, width - tables.shape[1])))
