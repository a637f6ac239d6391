"""Paged attention with an online softmax, for prefill chunks and decoding tokens alike.

Keys are taken in tiles of 64 positions that start at multiples of 64 of the sequence, so a query
meets the same tiles in the same order in whichever chunk it is computed. Within a tile scores and
the weighted sum of values are `tile_product`s; a masked key adds an exact zero. A work item is a
run of queries of one sequence and one KV head, with all query heads that share it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.runner.kernels.team import claim, finish, wait_for_all
from engine.runner.kernels.tile_product import MAX_TILE_ROWS, tile_product
from engine.runner.kernels.vector_ir import LANES
from engine.runner.kernels.vector_math import KEY_TILE, softmax_tile, transpose_8x8

_QUERY_ROWS = 96
"""Rows (queries × heads of a group) of a work item, about what a core's own cache can hold."""
_FLOAT_BYTES = 4
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def plan_items(
    row_starts: np.ndarray, positions: np.ndarray, num_kv_heads: int, group_size: int
) -> np.ndarray:
    """Return work items `[n, 4]`: sequence, first row, end row, KV head; the longest first.

    `row_starts` `[sequences + 1]` are the sequences' rows in the flat batch.
    """
    step = max(1, _QUERY_ROWS // group_size)
    items = []
    for sequence in range(len(row_starts) - 1):
        end = int(row_starts[sequence + 1])
        for row in range(int(row_starts[sequence]), end, step):
            row_end = min(end, row + step)
            cost = (int(positions[row_end - 1]) // KEY_TILE + 1) * (row_end - row)
            items += [(-cost, sequence, row, row_end, head) for head in range(num_kv_heads)]
    items.sort()
    return np.array(items, dtype=np.int64)[:, 1:].copy()


@njit(nogil=True, cache=True, error_model="numpy")
def _load_tile(keys, values, blocks, head, start, count, gathered, key_tile) -> int:  # type: ignore[no-untyped-def]
    """Transpose `count` keys from position `start` into `key_tile`; return their values' address.

    Blocks of at least a tile are read in place; smaller ones are gathered first.
    """
    block_size, head_dim = keys.shape[2], keys.shape[3]
    if block_size >= KEY_TILE:
        block, offset = blocks[start // block_size], start % block_size
        key_at = keys[block, head, offset:].ctypes.data
        value_at = values[block, head, offset:].ctypes.data
    else:
        for j in range(count):
            block, offset = blocks[(start + j) // block_size], (start + j) % block_size
            for i in range(head_dim):
                gathered[0, j, i] = keys[block, head, offset, i]
                gathered[1, j, i] = values[block, head, offset, i]
        key_at, value_at = gathered[0].ctypes.data, gathered[1].ctypes.data
    tile_at = key_tile.ctypes.data
    for j in range(0, count, 8):
        for i in range(0, head_dim, 8):
            transpose_8x8(
                key_at + (j * head_dim + i) * _FLOAT_BYTES, head_dim,
                tile_at + (i * KEY_TILE + j) * _FLOAT_BYTES, KEY_TILE,
            )  # fmt: skip
    return value_at


@njit(nogil=True, cache=True, error_model="numpy")
def _softmax_row(scores, num_valid, maximum, sums, weighted) -> None:  # type: ignore[no-untyped-def]
    """Apply one row's online softmax over a tile: turn `scores` to weights, rescale earlier sums.

    `maximum` `[1]` and `sums` `[16]` are the row's running state; each lane sums its own keys.
    """
    for j in range(num_valid, KEY_TILE):
        scores[j] = _MINUS_INFINITY
    scale = softmax_tile(scores.ctypes.data, maximum.ctypes.data, sums.ctypes.data)
    if scale != _ONE:
        for i in range(weighted.shape[0]):
            weighted[i] *= scale


@njit(nogil=True, cache=True, error_model="numpy")
def _products(rows, a, a_stride, b, b_stride, depth, c, c_stride, width, is_added) -> None:  # type: ignore[no-untyped-def]
    """Apply `tile_product` to any number of rows and `width` columns (a multiple of 16)."""
    for row in range(0, rows, MAX_TILE_ROWS):
        tile_rows = min(MAX_TILE_ROWS, rows - row)
        for column in range(0, width, LANES):
            tile_product(
                tile_rows, a + row * a_stride * _FLOAT_BYTES, a_stride,
                b + column * _FLOAT_BYTES, b_stride, depth,
                c + (row * c_stride + column) * _FLOAT_BYTES, c_stride, is_added,
            )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_item(qkv, keys, values, blocks, first, end, head, position, scratch, out) -> None:  # type: ignore[no-untyped-def]
    """Attend from rows `first` to `end`, the first at `position`, to all positions before them."""
    queries, scores, weighted, maxima, sums, key_tile, gathered = scratch
    head_dim, num_kv_heads = keys.shape[3], keys.shape[1]
    group = (qkv.shape[1] - 2 * num_kv_heads) // num_kv_heads
    rows = (end - first) * group
    for r in range(rows):
        for i in range(head_dim):
            queries[r, i] = qkv[first + r // group, head * group + r % group, i]
            weighted[r, i] = _ZERO
        maxima[r, 0] = _MINUS_INFINITY
        for lane in range(LANES):
            sums[r, lane] = _ZERO
    num_keys = position + (end - first)
    for start in range(0, num_keys, KEY_TILE):
        count = min(KEY_TILE, num_keys - start)
        value_at = _load_tile(keys, values, blocks, head, start, count, gathered, key_tile)
        _products(
            rows, queries.ctypes.data, head_dim, key_tile.ctypes.data, KEY_TILE, head_dim,
            scores.ctypes.data, KEY_TILE, -(-count // LANES) * LANES, 0,
        )  # fmt: skip
        for r in range(rows):
            num_valid = max(0, min(count, position + r // group + 1 - start))
            _softmax_row(scores[r], num_valid, maxima[r], sums[r], weighted[r])
        _products(
            rows, scores.ctypes.data, KEY_TILE, value_at, head_dim, count,
            weighted.ctypes.data, head_dim, head_dim, 1,
        )  # fmt: skip
    for r in range(rows):
        total = sums[r, 0]
        for lane in range(1, LANES):
            total += sums[r, lane]
        for i in range(head_dim):
            out[first + r // group, head * group + r % group, i] = weighted[r, i] / total


@njit(nogil=True, cache=True, error_model="numpy")
def attention_phase(  # type: ignore[no-untyped-def]
    progress, phase, qkv, keys, values, block_tables, positions, items, out
) -> None:  # fmt: skip
    """Compute a team's `out` `[rows, heads, head_dim]` from queries prepared by `rotary_phase`.

    `keys` and `values` are one layer's `[num_blocks, kv_heads, block_size, head_dim]`,
    `block_tables` `[sequences, blocks]`, `items` from `plan_items`. Every position up to a query's
    own must be in the cache.
    """
    head_dim, num_kv_heads = keys.shape[3], keys.shape[1]
    group = (qkv.shape[1] - 2 * num_kv_heads) // num_kv_heads
    rows = max(1, _QUERY_ROWS // group) * group
    scratch = (
        np.empty((rows, head_dim), np.float32),
        np.empty((rows, KEY_TILE), np.float32),
        np.empty((rows, head_dim), np.float32),
        np.empty((rows, 1), np.float32),
        np.empty((rows, LANES), np.float32),
        np.zeros((head_dim, KEY_TILE), np.float32),
        np.zeros((2, KEY_TILE, head_dim), np.float32),
    )
    num_items = items.shape[0]
    item = claim(progress, phase)
    while item < num_items:
        sequence, first, end, head = items[item]
        _attend_item(
            qkv, keys, values, block_tables[sequence], first, end, head, positions[first],
            scratch, out,
        )  # fmt: skip
        finish(progress, phase)
        item = claim(progress, phase)
    wait_for_all(progress, phase, num_items)
