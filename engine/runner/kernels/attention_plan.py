"""The work items of a step's attention: which thread-sized parts it is divided into.

An item is a run of a sequence's rows at one KV head. Where a few long items would leave threads
without work, as with one long sequence that decodes, they are divided further, into pieces of their
keys. Whether an item is divided changes no result: `attention` merges pieces in the same order in
either case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from engine.runner.kernels.vector_math import KEY_TILE

QUERY_ROWS = 96
"""Rows (queries × heads of a group) of a work item, about what a core's own cache can hold."""
PIECE_KEYS = 256
"""Keys of a piece, a multiple of a tile's. Another number gives other bits beyond so many keys."""
NO_WINDOW = 1 << 40
"""The window of layers whose rows attend to all positions up to their own."""
PART_ROWS = 16384
"""Rows of the buffer for the pieces' results: beyond them items stay whole."""
_DIVIDED_ROWS = 24
"""The most rows of an item that is divided; longer chunks have several items in any case."""
_ITEMS_PER_THREAD = 8
"""Items of average length per thread that are enough to give threads equal work."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The items of one step in the layers of one window, and what is merged after them.

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
    window: int = NO_WINDOW,
) -> AttentionPlan:
    """Return the work of a step for `num_threads` threads.

    `row_starts` `[sequences + 1]` are the sequences' rows in the flat batch. A row attends to the
    last `window` positions up to its own.
    """
    runs = _runs(row_starts, positions, max(1, QUERY_ROWS // group_size), window)
    return AttentionPlan(*_items(runs, num_kv_heads, group_size, num_threads))


@njit(nogil=True, cache=True)
def _runs(row_starts: np.ndarray, positions: np.ndarray, step: int, window: int) -> np.ndarray:
    """Return runs of at most `step` rows of one sequence, the longest first.

    `[n, 6]`: sequence, first row, end row, first key that a row sees, number of keys, cost.
    """
    num_runs = 0
    for sequence in range(len(row_starts) - 1):
        num_runs += -(-(row_starts[sequence + 1] - row_starts[sequence]) // step)
    runs = np.empty((num_runs, 6), np.int64)
    run = 0
    for sequence in range(len(row_starts) - 1):
        for first in range(row_starts[sequence], row_starts[sequence + 1], step):
            end = min(first + step, row_starts[sequence + 1])
            first_key, num_keys = max(0, positions[first] + 1 - window), positions[end - 1] + 1
            cost = (-(-num_keys // KEY_TILE) - first_key // KEY_TILE) * (end - first)
            runs[run] = sequence, first, end, first_key, num_keys, cost
            run += 1
    return runs[np.argsort(-runs[:, 5], kind="mergesort")]


@njit(nogil=True, cache=True)
def _items(
    runs: np.ndarray, num_kv_heads: int, group_size: int, num_threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return items and merges of an `AttentionPlan`; item `n` would be head `n % num_kv_heads`."""
    pieces = _num_pieces(runs, num_kv_heads, group_size, num_threads)
    num_divided = np.count_nonzero(pieces)
    whole = pieces.sum()  # whole items come after all pieces
    items = np.empty((whole + len(pieces) - num_divided, 6), np.int64)
    merges = np.empty((num_divided, 6), np.int64)
    item = merge = part = 0
    for number, count in enumerate(pieces):
        sequence, first, end, first_key = runs[number // num_kv_heads, :4]
        head, rows = number % num_kv_heads, (end - first) * group_size
        if not count:
            items[whole] = sequence, first, end, head, -1, 0
            whole += 1
            continue
        first_piece = first_key // PIECE_KEYS
        merges[merge] = first, end, head, group_size, count, part
        merge += 1
        for piece in range(count):
            items[item] = sequence, first, end, head, first_piece + piece, part + piece * rows
            item += 1
        part += count * rows
    return items, merges


@njit(nogil=True, cache=True)
def _num_pieces(
    runs: np.ndarray, num_kv_heads: int, group_size: int, num_threads: int
) -> np.ndarray:
    """Return the number of pieces of each run at each head; 0: it stays whole."""
    pieces = np.zeros(len(runs) * num_kv_heads, np.int64)
    all_costs = runs[:, 5].sum() * num_kv_heads
    num_parts = 0
    for number in range(len(pieces)):
        _, first, end, first_key, num_keys, cost = runs[number // num_kv_heads]
        rows = (end - first) * group_size
        count = -(-num_keys // PIECE_KEYS) - first_key // PIECE_KEYS
        is_few = rows <= _DIVIDED_ROWS or end - first == 1
        is_long = cost * (_ITEMS_PER_THREAD * num_threads) > all_costs
        if is_few and is_long and count > 1:
            num_parts += rows * count
            if num_parts <= PART_ROWS:
                pieces[number] = count
    return pieces
