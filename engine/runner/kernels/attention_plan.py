"""The work items of a step's attention: which thread-sized parts it is divided into.

An item is a run of a sequence's rows at one KV head. Where a few long items would leave threads
without work, as with one long sequence that decodes, they are divided further, into pieces of their
keys. Whether an item is divided changes no result: `attention` merges pieces in the same order in
either case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.runner.kernels.vector_math import KEY_TILE

QUERY_ROWS = 96
"""Rows (queries × heads of a group) of a work item, about what a core's own cache can hold."""
PIECE_KEYS = 256
"""Keys of a piece, a multiple of a tile's. Another number gives other bits beyond so many keys."""
PART_ROWS = 16384
"""Rows of the buffer for the pieces' results: beyond them items stay whole."""
_DIVIDED_ROWS = 24
"""The most rows of an item that is divided; longer chunks have several items in any case."""
_ITEMS_PER_THREAD = 8
"""Items of average length per thread that are enough to give threads equal work."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The items of one step, and what is merged after them.

    `items` are `[n, 6]`: sequence, first row, end row, KV head, piece of the keys (-1: all of
    them), first row of `parts`; the longest first. `merges` are `[m, 6]`: first row, end row, KV
    head, query heads per KV head, number of pieces, first row of `parts`.
    """

    items: np.ndarray
    merges: np.ndarray


def plan_attention(
    row_starts: np.ndarray,
    positions: np.ndarray,
    num_kv_heads: int,
    group_size: int,
    num_threads: int,
) -> AttentionPlan:
    """Return the work of a step for `num_threads` threads.

    `row_starts` `[sequences + 1]` are the sequences' rows in the flat batch.
    """
    sequences, firsts, ends = _runs(row_starts, max(1, QUERY_ROWS // group_size))
    num_keys = positions[ends - 1] + 1
    costs = -(-num_keys // KEY_TILE) * (ends - firsts)
    order = np.argsort(-costs, kind="stable")
    runs = np.stack((sequences, firsts, ends, num_keys, costs))[:, order]
    sequences, firsts, ends, num_keys, costs = np.repeat(runs, num_kv_heads, axis=1)
    heads = np.tile(np.arange(num_kv_heads), len(order))

    rows, num_pieces = (ends - firsts) * group_size, -(-num_keys // PIECE_KEYS)
    is_few = (rows <= _DIVIDED_ROWS) | (ends - firsts == 1)
    is_long = costs * (_ITEMS_PER_THREAD * num_threads) > costs.sum()
    divided = np.flatnonzero(is_few & is_long & (num_pieces > 1))
    last_parts = np.cumsum(rows[divided] * num_pieces[divided])
    divided = divided[last_parts <= PART_ROWS]
    whole = np.ones(len(heads), bool)
    whole[divided] = False

    rows, num_pieces = rows[divided], num_pieces[divided]
    parts = last_parts[: len(divided)] - rows * num_pieces
    pieces = np.arange(num_pieces.sum()) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    of_piece = np.repeat(np.arange(len(divided)), num_pieces)
    items = np.stack((sequences, firsts, ends, heads, np.full(len(heads), -1), 0 * heads), axis=1)
    divided_items = items[divided][of_piece]
    divided_items[:, 4] = pieces
    divided_items[:, 5] = parts[of_piece] + pieces * rows[of_piece]
    merges = np.stack(
        (
            firsts[divided], ends[divided], heads[divided], np.full(len(divided), group_size),
            num_pieces, parts,
        ),
        axis=1,
    )  # fmt: skip
    return AttentionPlan(np.concatenate((divided_items, items[whole])), merges)


def _runs(row_starts: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return runs of at most `step` rows of one sequence: sequences, first rows, end rows."""
    counts = -(-np.diff(row_starts) // step)
    sequences = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = row_starts[sequences] + index * step
    return sequences, firsts, np.minimum(firsts + step, row_starts[sequences + 1])
