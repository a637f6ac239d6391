"""Paged attention with an online softmax, for prefill chunks and decoding tokens alike.

A query's keys are divided into pieces of `PIECE_KEYS` positions from the beginning of the sequence.
Within a piece keys are taken in tiles of 64, in order, with an online softmax; then the pieces are
merged, in order. So a row meets the same operations in the same order in whichever chunk it is
computed, and also when several threads compute its pieces: what it results in depends on its query
and its keys alone. Within a tile scores and the weighted sum of values are `tile_product`s; a
masked key adds an exact zero. Keys and values in fewer bits are widened when they are read
(`kv_slots`), and then meet the same operations as floats.

A *sink* is a score of a query head that takes its share of the softmax and has no value. It enters
when a row's pieces are merged, as one more weight in the sum by which the row is divided.

With a sliding window a row begins at the piece, and in it at the tile, of the first key that it
sees. Those before it are read only for other rows of its item, and change no bit of its state.

A work item is a run of queries of one sequence and one KV head, with all query heads that share it,
over all of their keys or over one piece (`attention_plan`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.runner.kernels.attention_plan import PIECE_KEYS, QUERY_ROWS
from engine.runner.kernels.kv_slots import (
    FLOATS,
    HALVES,
    item_bytes,
    slot_at,
    transpose_bytes,
    transpose_halves,
    widen_slot,
)
from engine.runner.kernels.products.tile_product import (
    MAX_TILE_ROWS,
    MAX_TILE_VECTORS,
    tile_product,
    wide_tile_product,
)
from engine.runner.kernels.team import claim, finish, wait_for_all
from engine.runner.kernels.vector_ir import LANES, prefetch_line
from engine.runner.kernels.vector_math import (
    KEY_TILE,
    exponential,
    softmax_tile,
    transpose_8x8,
)

_FLOAT_BYTES = 4
_LINE_BYTES = 64
_WIDE = MAX_TILE_VECTORS * LANES
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
STATE_LANES = 2 * LANES
"""Floats of a row's softmax state after its weighted sum of values.

They are sixteen sums of weights, one per lane, and a vector that begins with the largest score.
"""


# Phase 1 of a tile: keys. All queries of an item use the same keys, so they are brought once into
# the layout of the score product: `key_tile[i, j]` is dimension i of key j, and sixteen adjacent
# keys are one vector. Values need no new layout: the second product takes them row by row, and
# where the cache stores floats it takes them from the cache itself.
#
# Three ways lead to the same numbers. Blocks smaller than a tile: each slot is widened into
# `gathered`, because a tile spans several blocks. Floats: a tile lies in one block, which is
# transposed as it is. bfloat16 and int8: the transposition widens, in registers.
#
# A block table may point anywhere, which the processor's own prefetching cannot follow. So the
# values of this tile and the keys of the next one are prefetched here, while the transposition
# keeps the processor busy. `key_tile` is never cleared: what an earlier tile left from `count` on
# gives scores that `_softmax_row` overwrites.
@njit(nogil=True, cache=True, error_model="numpy")
def _load_tile(keys, values, blocks, head, start, count, gathered, key_tile) -> int:  # type: ignore[no-untyped-def]
    """Transpose `count` keys from position `start` into `key_tile`; return their values' address.

    Floats in blocks of at least a tile are read in place; others are widened and gathered first.
    """
    block_size, slot_bytes, head_dim = keys.shape[2], keys.shape[3], gathered.shape[2]
    kind = item_bytes(slot_bytes, head_dim)
    tile_at = key_tile.ctypes.data
    if block_size < KEY_TILE:
        for j in range(count):
            block, offset = blocks[(start + j) // block_size], (start + j) % block_size
            key_at, value_at = (
                slot_at(keys, block, head, offset),
                slot_at(values, block, head, offset),
            )
            widen_slot(key_at, gathered[0, j].ctypes.data, head_dim, kind)
            widen_slot(value_at, gathered[1, j].ctypes.data, head_dim, kind)
        key_at, value_at = gathered[0].ctypes.data, gathered[1].ctypes.data
        _transpose_floats(key_at, value_at, key_at, count, head_dim, tile_at)
        return value_at
    block, offset = blocks[start // block_size], start % block_size
    key_at, value_at = slot_at(keys, block, head, offset), slot_at(values, block, head, offset)
    next_at = key_at
    if start + KEY_TILE < blocks.shape[0] * block_size:
        following = start + KEY_TILE
        next_at = slot_at(keys, blocks[following // block_size], head, following % block_size)
    if kind == FLOATS:
        _transpose_floats(key_at, value_at, next_at, count, head_dim, tile_at)
        return value_at
    for ahead in range(0, count * slot_bytes, _LINE_BYTES):
        prefetch_line(value_at + ahead)
    for j in range(0, count, 8):
        slots_at = key_at + j * slot_bytes
        for i in range(0, head_dim, 8):
            place_at = tile_at + (i * KEY_TILE + j) * _FLOAT_BYTES
            if kind == HALVES:
                transpose_halves(slots_at + i * HALVES, slot_bytes, place_at, KEY_TILE)
            else:
                transpose_bytes(slots_at + i, slots_at + head_dim, slot_bytes, place_at, KEY_TILE)
    for ahead in range(0, KEY_TILE * slot_bytes, _LINE_BYTES):
        prefetch_line(next_at + ahead)
    for j in range(count):
        widen_slot(value_at + j * slot_bytes, gathered[1, j].ctypes.data, head_dim, kind)
    return gathered[1].ctypes.data


@njit(nogil=True, cache=True, error_model="numpy")
def _transpose_floats(key_at, value_at, next_at, count, head_dim, tile_at) -> None:  # type: ignore[no-untyped-def]
    """Transpose keys, and prefetch their values and the next tile's keys meanwhile."""
    for j in range(0, count, 8):
        for i in range(0, head_dim, 8):
            ahead = (j * head_dim + 8 * i) * _FLOAT_BYTES
            for line in range(0, 4 * _LINE_BYTES, _LINE_BYTES):
                prefetch_line(value_at + ahead + line)
                prefetch_line(next_at + ahead + line)
            transpose_8x8(
                key_at + (j * head_dim + i) * _FLOAT_BYTES, head_dim,
                tile_at + (i * KEY_TILE + j) * _FLOAT_BYTES, KEY_TILE,
            )  # fmt: skip


# Phase 2 of a tile: the online softmax. The state of a row is one array:
#
#     0 … head_dim         the sum of e^(score - largest) · value, not yet divided
#     … + 16               sixteen partial sums of e^(score - largest), one for each lane
#     … + 1                the largest score so far (a vector that begins with it)
#
# When a tile has a larger score, everything summed so far is multiplied by e^(old - new). The
# factor is 1 for most tiles, and then nothing is touched: multiplying by 1 would change no bit, so
# the shortcut does not either. A masked key (after the row's own position, or before its window)
# has the score minus infinity: its weight is an exact zero, so a row has the same bits whether
# other rows' keys are in the tile or not. A tile without any key for the row leaves its state
# alone, which may still be empty, and minus infinity less itself is no number. The partial sums are
# added only at the end, in the order of the lanes.
@njit(nogil=True, cache=True, error_model="numpy")
def _softmax_row(scores, num_hidden, num_valid, state, head_dim) -> None:  # type: ignore[no-untyped-def]
    """Turn a row's `scores` of a tile to weights, and rescale what its `state` has summed.

    The row sees the keys from `num_hidden` to `num_valid`, if any.
    """
    if num_hidden >= num_valid:
        for j in range(KEY_TILE):
            scores[j] = _ZERO
        return
    for j in range(num_hidden):
        scores[j] = _MINUS_INFINITY
    for j in range(num_valid, KEY_TILE):
        scores[j] = _MINUS_INFINITY
    sums_at = state[head_dim:].ctypes.data
    scale = softmax_tile(scores.ctypes.data, sums_at + LANES * _FLOAT_BYTES, sums_at)
    if scale != _ONE:
        for i in range(head_dim):
            state[i] *= scale


@njit(nogil=True, cache=True, error_model="numpy")
def _products(rows, a, a_stride, b, b_stride, depth, c, c_stride, width, is_added) -> None:  # type: ignore[no-untyped-def]
    """Apply `tile_product` to any number of rows and `width` columns (a multiple of 16)."""
    for row in range(0, rows, MAX_TILE_ROWS):
        tile_rows = min(MAX_TILE_ROWS, rows - row)
        a_at = a + row * a_stride * _FLOAT_BYTES
        c_at = c + row * c_stride * _FLOAT_BYTES
        column = 0
        while column < width:
            b_column, c_column = b + column * _FLOAT_BYTES, c_at + column * _FLOAT_BYTES
            if column + _WIDE <= width:
                wide_tile_product(
                    tile_rows, a_at, a_stride, b_column, b_stride, depth, c_column, c_stride,
                    is_added,
                )  # fmt: skip
                column += _WIDE
            else:
                tile_product(
                    tile_rows, a_at, a_stride, b_column, b_stride, depth, c_column, c_stride,
                    is_added,
                )  # fmt: skip
                column += LANES


# One piece: at most 256 keys at a fixed position, in tiles of 64, from states that are empty. Tiles
# that lie before the windows of all rows are not read.
# For each tile: the keys (`_load_tile`), scores = queries · key_tile, the softmax of each row,
# states += scores · values. Both products are chains in a fixed order, over `head_dim` and over the
# keys of the tile, however many rows are computed together.
#
# Rows are queries times the query heads of one KV head: row r is at `position + r // group`, where
# its valid keys of a tile end. Keys of the step itself are in the cache by now: `rotary_phase`
# wrote them, and the team waited for all of that phase.
@njit(nogil=True, cache=True, error_model="numpy")
def _attend_piece(  # type: ignore[no-untyped-def]
    keys, values, blocks, head, group, rows, position, window, first_key, end_key, tiles, states
) -> None:
    """Set the states of `rows` queries to their softmax over the keys of one piece.

    The state of a row without a key here stays empty: `_merge` must not meet it.
    """
    queries, scores, key_tile, gathered = tiles
    head_dim, state_size = queries.shape[1], states.shape[1]
    for r in range(rows):
        for i in range(head_dim + LANES):
            states[r, i] = _ZERO
        states[r, head_dim + LANES] = _MINUS_INFINITY
    first_seen = max(first_key, (position + 1 - window) // KEY_TILE * KEY_TILE)
    for start in range(first_seen, end_key, KEY_TILE):
        count = min(KEY_TILE, end_key - start)
        value_at = _load_tile(keys, values, blocks, head, start, count, gathered, key_tile)
        _products(
            rows, queries.ctypes.data, head_dim, key_tile.ctypes.data, KEY_TILE, head_dim,
            scores.ctypes.data, KEY_TILE, -(-count // LANES) * LANES, 0,
        )  # fmt: skip
        for r in range(rows):
            num_seen = position + r // group + 1 - start
            num_hidden, num_valid = max(0, num_seen - window), min(count, num_seen)
            _softmax_row(scores[r], num_hidden, num_valid, states[r], head_dim)
        _products(
            rows, scores.ctypes.data, KEY_TILE, value_at, head_dim, count, states.ctypes.data,
            state_size, head_dim, 1,
        )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _merge(state, piece, head_dim) -> None:  # type: ignore[no-untyped-def]
    """Add the softmax over a further piece of keys to a row's."""
    largest, found = state[head_dim + LANES], piece[head_dim + LANES]
    new = found if found > largest else largest
    scale, piece_scale = exponential(largest - new), exponential(found - new)
    for i in range(head_dim + LANES):
        state[i] = state[i] * scale + piece[i] * piece_scale
    state[head_dim + LANES] = new


@njit(nogil=True, cache=True, error_model="numpy")
def _first_piece(position, window) -> int:  # type: ignore[no-untyped-def]
    """Return the piece of the first key that a row at `position` sees."""
    return max(0, position + 1 - window) // PIECE_KEYS


@njit(nogil=True, cache=True, error_model="numpy")
def _put(state, sinks, head, out) -> None:  # type: ignore[no-untyped-def]
    """Write a row's attention over all of its keys; `sinks` may be empty."""
    head_dim = out.shape[0]
    total = state[head_dim]
    for lane in range(1, LANES):
        total += state[head_dim + lane]
    if sinks.size:
        # Far above all scores the power is at its cap, e^88, and what is divided by it is near 0.
        total += exponential(sinks[head] - state[head_dim + LANES])
    for i in range(head_dim):
        out[i] = state[i] / total


# One item, whole or a piece of it. The two ways must give the same bits, because which one is taken
# depends on the other sequences of the step. Therefore the whole way also computes each piece from
# an empty state and merges it into what came before: exactly the calls that several threads and
# `merge_phase` make together. One softmax over all keys would be a little faster, and different.
#
# A row of a chunk that lies before a piece, or whose window begins after it, has no key in it. Its
# state is empty, and it is left out of the merge: the state of its first piece is its beginning.
@njit(nogil=True, cache=True, error_model="numpy")
def _attend_item(  # type: ignore[no-untyped-def]
    qkv, keys, values, blocks, first, end, head, position, window, piece, tiles, states, parts,
    sinks, out,
) -> None:  # fmt: skip
    """Attend from rows `first` to `end`, the first at `position`.

    A `piece` of -1 means all positions up to a row's own, and writes `out`; otherwise only one
    piece of them, and writes the rows' states to `parts`.
    """
    head_dim = qkv.shape[2]
    group = (qkv.shape[1] - 2 * keys.shape[1]) // keys.shape[1]
    rows = (end - first) * group
    queries = tiles[0]
    for r in range(rows):
        for i in range(head_dim):
            queries[r, i] = qkv[first + r // group, head * group + r % group, i]
    num_keys = position + (end - first)
    if piece >= 0:
        first_key = piece * PIECE_KEYS
        _attend_piece(
            keys, values, blocks, head, group, rows, position, window, first_key,
            min(num_keys, first_key + PIECE_KEYS), tiles, parts,
        )  # fmt: skip
        return
    whole, further = states
    begin = _first_piece(position, window) * PIECE_KEYS
    for first_key in range(begin, num_keys, PIECE_KEYS):
        _attend_piece(
            keys, values, blocks, head, group, rows, position, window, first_key,
            min(num_keys, first_key + PIECE_KEYS), tiles, whole if first_key == begin else further,
        )  # fmt: skip
        if first_key > begin:
            for r in range(max(0, first_key - position) * group, rows):
                own = _first_piece(position + r // group, window) * PIECE_KEYS
                if own < first_key:
                    _merge(whole[r], further[r], head_dim)
                elif own == first_key:
                    whole[r] = further[r]
    for r in range(rows):
        of_query = head * group + r % group
        _put(whole[r], sinks, of_query, out[first + r // group, of_query])


# The phase as a team runs it. `attention_plan` lists the items, the longest first, so that the last
# ones to be claimed are short and threads end at about the same time. A member claims the next item
# with an atomic counter; there is no fixed division, because threads may be taken off their
# processors. Its tiles and states are allocated once and reused for every item: queries
# `[96 rows, head_dim]`, scores `[96, 64]`, a key tile and a value tile stay in a core's own cache.
#
# All query heads of a KV head are in one item, so keys and values are read from memory once for the
# group. A whole item writes `out`. An item that is one piece of a long sequence writes its rows'
# states to `parts`, from the row that the plan names; no two items write the same row of either.
# The phase ends when all items are finished, not when all are claimed: the next one reads `out`.
@njit(nogil=True, cache=True, error_model="numpy")
def attention_phase(  # type: ignore[no-untyped-def]
    counters, qkv, keys, values, block_tables, positions, window, items, sinks, parts, out
) -> None:
    """Compute a team's `out` `[rows, heads, head_dim]` from queries prepared by `rotary_phase`.

    `keys` and `values` are one layer's bytes `[num_blocks, kv_heads, block_size, slot_bytes]`,
    `block_tables` `[sequences, blocks]`, `items` and the number of `parts` `[…, head_dim +
    STATE_LANES]` from an `attention_plan` for `window`. Every position up to a query's own, of the
    last `window`, must be in the cache. `sinks` `[heads]` may be empty. What was divided into
    pieces is in `parts` then, for `merge_phase`.
    """
    head_dim, num_kv_heads = qkv.shape[2], keys.shape[1]
    group = (qkv.shape[1] - 2 * num_kv_heads) // num_kv_heads
    rows = max(1, QUERY_ROWS // group) * group
    tiles = (
        np.empty((rows, head_dim), np.float32),
        np.empty((rows, KEY_TILE), np.float32),
        np.zeros((head_dim, KEY_TILE), np.float32),
        np.zeros((2, KEY_TILE, head_dim), np.float32),
    )
    states = np.empty((2, rows, head_dim + STATE_LANES), np.float32)
    num_items = items.shape[0]
    item = claim(counters)
    while item < num_items:
        sequence, first, end, head, piece, part = items[item]
        _attend_item(
            qkv, keys, values, block_tables[sequence], first, end, head, positions[first], window,
            piece, tiles, (states[0], states[1]), parts[part:], sinks, out,
        )  # fmt: skip
        finish(counters)
        item = claim(counters)
    wait_for_all(counters, num_items)


# Only for what was divided, which few steps have: then `merges` is empty and a member leaves at
# once. `parts` has the states of one run of rows piece after piece, `rows` each. They are merged in
# ascending order into a row's first one, as `_attend_item` does for a whole item, from the piece
# where its window begins up to that of its own position. `_put` divides by the sum of weights,
# once, at the end.
@njit(nogil=True, cache=True, error_model="numpy")
def merge_phase(counters, positions, window, merges, sinks, parts, out) -> None:  # type: ignore[no-untyped-def]
    """Merge a team's pieces in `parts` into `out`; `merges` are from an `attention_plan`."""
    head_dim = out.shape[2]
    num_merges = merges.shape[0]
    merge = claim(counters)
    while merge < num_merges:
        first, end, head, group, num_pieces, part = merges[merge]
        rows, first_piece = (end - first) * group, _first_piece(positions[first], window)
        for r in range(rows):
            position = positions[first] + r // group
            begin = _first_piece(position, window) - first_piece
            whole = parts[part + begin * rows + r]
            own = position // PIECE_KEYS - first_piece
            for piece in range(begin + 1, min(num_pieces, own + 1)):
                _merge(whole, parts[part + piece * rows + r], head_dim)
            of_query = head * group + r % group
            _put(whole, sinks, of_query, out[first + r // group, of_query])
        finish(counters)
        merge = claim(counters)
    wait_for_all(counters, num_merges)
