"""Attention over cached keys: in pieces at fixed positions, merged in ascending order.

A piece is PIECE keys whose positions begin at a multiple of PIECE. Decoding computes the pieces of
a sequence in different programs, and `merge_pieces` merges them; a chunk's programs merge them in
registers. Both merge the same numbers in the same order, so they give the same bits. Inside a piece
the matrix unit adds everything that is added over keys, the sum of the softmax weights included (a
product with a column of ones), so the tile's shape does not enter either.

Rows of the matrix unit's tile are (query row, head of the group). Scores are in base 2: `scale`
contains log2(e).

A row of a layer with a `window` sees the last `window` positions up to its own. It begins at the
piece of its first visible key, with the keys before it masked, so what it merges follows from its
position alone. Pieces before the windows of all rows of a sequence, or of a tile, are not read. A
row that sees no key of a piece gets a sum of 0 with LOWEST as its top: that piece, merged before
the row's first one, leaves its state as it was, to the bit. `window` None: a row sees all keys.

A head's sink is a score in base e that has no value: it joins a row's sum when all its pieces are
merged, so it depends on no piece. `sinks` None: there are none.

Keys and values of a byte each (`kernels/slots.py`) are exact in bfloat16. A key's scale multiplies
its scores, and a value's scale its weights, before they are rounded: one multiplication for each
score, where scaling the numbers would cost one for each of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin
from engine.runner.gpu.kernels.slots import load_slots

LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


# One block of keys: the softmax is online. `top` is the largest score up to here. A block with a
# larger one makes all earlier sums too large by the same factor, so these are multiplied by `fade`
# = 2^(old top - new top), which is 1 where the top stays. The weights are rounded to the queries'
# type before they are added: the sum then consists of exactly the weights that the values were
# multiplied with. A product with a column of ones adds them in the matrix unit, in the order in
# which it adds the weighted values, for every tile. A key that does not count has the score LOWEST,
# and its weight is set to 0: before the first key that counts, LOWEST is the top itself, and 2^0
# would be 1.
@triton.jit
def _advance(query, other_query, key, value, ones, is_key, scale, top, weight_sum, total, other,
             HAS_SCALES: tl.constexpr):  # fmt: skip
    """Add a block of keys to a piece: its largest score, sum of weights, and weighted values.

    `key` and `value` are what `load_slots` returns. With HAS_SCALES query and weighted values are
    halves too, `other_query` and `other` the second ones.
    """
    scores = tl.dot(query, tl.trans(key[0]))
    if HAS_SCALES:
        scores = tl.dot(other_query, tl.trans(key[1]), scores) * scale * key[2][None, :]
    else:
        scores = scores * scale
    scores = tl.where(is_key, scores, LOWEST)
    new_top = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - new_top)
    exact = tl.where(is_key, tl.exp2(scores - new_top[:, None]), 0.0)
    weights = exact.to(query.dtype)
    weight_sum = tl.dot(weights, ones, weight_sum * fade[:, None])
    if HAS_SCALES:
        # The scale of a slot that does not count is arbitrary.
        weights = tl.where(is_key, exact * value[2][None, :], 0.0).to(query.dtype)
        other = tl.dot(weights, value[1], other * fade[:, None])
    total = tl.dot(weights, value[0], total * fade[:, None])
    return new_top, weight_sum, total, other


@triton.jit
def _seen(position, limit, window):
    """Return which keys at `position` [keys] the rows at `limit` [BM] see: [BM, keys]."""
    seen = position[None, :] <= limit[:, None]
    if window is not None:
        seen &= position[None, :] > limit[:, None] - window
    return seen


@triton.jit
def _load_query(rows, is_row, DIM: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Return the queries at these addresses [BM, 1], with HAS_SCALES in two halves."""
    WIDTH: tl.constexpr = DIM // 2 if HAS_SCALES else DIM
    lanes = tl.arange(0, WIDTH)[None, :]
    query = tl.load(rows + lanes, mask=is_row, other=0.0)
    other = query
    if HAS_SCALES:
        other = tl.load(rows + WIDTH + lanes, mask=is_row, other=0.0)
    return query, other


@triton.jit
def _store_result(rows, is_row, result, other, DIM: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Write results, with HAS_SCALES in two halves, to these addresses [BM, 1]."""
    WIDTH: tl.constexpr = DIM // 2 if HAS_SCALES else DIM
    lanes = tl.arange(0, WIDTH)[None, :]
    tl.store(rows + lanes, result, mask=is_row)
    if HAS_SCALES:
        tl.store(rows + WIDTH + lanes, other, mask=is_row)


@triton.jit
def _piece(query, other_query, keys, values, key_scales, value_scales, table, head, start, stop,
           limit, window, scale, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, HAS_SCALES: tl.constexpr):  # fmt: skip
    """Return the largest score, the sum of weights and the weighted values of keys start to stop.

    The weighted values come last, in halves as in `_advance`.

    `limit` [BM] is each row's own position: keys after it do not count, nor those before `window`.
    """
    places = tl.arange(0, BN)
    ones = tl.full((BN, 16), 1.0, tl.float32).to(query.dtype)
    top = tl.full((BM,), LOWEST, tl.float32)
    weight_sum = tl.zeros((BM, 16), tl.float32)
    total = tl.zeros((BM, query.shape[1]), tl.float32)
    other = tl.zeros((BM, query.shape[1]), tl.float32)
    for first in range(start, stop, BN):
        block = tl.load(table + first // BLOCK).to(tl.int64)
        own = block * KV_HEADS + head
        place = first % BLOCK + places
        key = load_slots(keys, key_scales, own, place, None, query.dtype, BLOCK, DIM, HAS_SCALES)
        value = load_slots(
            values, value_scales, own, place, first + places < stop, query.dtype, BLOCK, DIM,
            HAS_SCALES,
        )  # fmt: skip
        is_key = _seen(first + places, limit, window)
        top, weight_sum, total, other = _advance(
            query, other_query, key, value, ones, is_key, scale, top, weight_sum, total, other,
            HAS_SCALES,
        )  # fmt: skip
    return top, weight_sum, total, other


@triton.jit
def list_pieces(last_positions, tables, table_width, num_sequences, reach, first_pieces,
                piece_sequences, piece_starts, piece_lasts, piece_blocks, BLOCK: tl.constexpr,
                PIECE: tl.constexpr, SEQUENCES: tl.constexpr,
                IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """List the pieces of all sequences, once for all layers with a window. Program: sequence.

    `first_pieces` [SEQUENCES + 1] are the index of each sequence's first piece in the list, and the
    length of the list. An entry holds the sequence, the piece's first position, the sequence's last
    one, and PIECE // BLOCK block ids (-1: after the sequence's end, or before all that is seen). A
    last position of -1 is padding: no pieces. Keys are seen up to `reach` before a sequence's last
    position, by its first row; None: all are.
    """
    begin(IS_PROGRAMMATIC)
    sequence = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    last = tl.load(last_positions + index, mask=index < num_sequences, other=-1)
    counts = tl.where(last >= 0, last // PIECE + 1, 0)
    if reach is not None:
        counts -= tl.maximum(last - reach, 0) // PIECE
    first = tl.sum(tl.where(index < sequence, counts, 0), 0)
    own = tl.sum(tl.where(index == sequence, counts, 0), 0)
    tl.store(first_pieces + sequence, first)
    if sequence == num_sequences - 1:
        tl.store(first_pieces + num_sequences, first + own)
    last_own = tl.sum(tl.where(index == sequence, last, 0), 0)
    parts: tl.constexpr = PIECE // BLOCK
    part = tl.arange(0, parts)
    num_hidden = 0
    if reach is not None:
        num_hidden = tl.maximum(last_own - reach, 0) // PIECE
    for piece in range(own):
        tl.store(piece_sequences + first + piece, sequence)
        tl.store(piece_starts + first + piece, (num_hidden + piece) * PIECE)
        tl.store(piece_lasts + first + piece, last_own)
        place = (num_hidden + piece) * parts + part
        is_block = place * BLOCK <= last_own
        if reach is not None:
            is_block &= (place + 1) * BLOCK > last_own - reach
        block = tl.load(
            tables + sequence.to(tl.int64) * table_width + place, mask=is_block, other=-1
        )
        tl.store(piece_blocks + (first + piece) * parts + part, block)


# Pieces of decodes. Sequences of very different lengths are one list of equal pieces, and each
# program takes as many as every other one: none waits for the longest sequence. A piece belongs to
# one KV head, whose keys are read once for all query heads of the group and all rows of the
# sequence (its drafts): they are the rows of the tile. Rows of a sequence end at positions of their
# own, so a row's `limit` cuts off keys that later rows see. A program's loop goes over blocks and
# not over pieces, because a loop inside a loop would be emptied and filled again at every piece;
# the first block of a piece clears the sums, and the last one stores them.
@triton.jit
def attend_pieces(queries, keys, values, key_scales, value_scales, first_pieces,
                  piece_sequences, piece_starts, piece_lasts, piece_blocks, totals, tops, scale,
                  num_sequences, window,
                  ROWS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                  DIM: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, PIECE: tl.constexpr,
                  PROGRAMS: tl.constexpr, HAS_SCALES: tl.constexpr,
                  IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute every piece of every KV head; a fixed number of programs shares them out evenly.

    Each sequence has ROWS query rows. The results are `totals` [pieces, KV_HEADS, BM, DIM] and
    `tops` [pieces, KV_HEADS, BM, 2] (the largest score and the sum of weights). A program walks all
    its blocks in one loop, so that the next piece's loads are under way before the last one ends.
    """
    begin(IS_PROGRAMMATIC)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PARTS: tl.constexpr = PIECE // BLOCK
    num_items = tl.load(first_pieces + num_sequences) * KV_HEADS
    each = tl.cdiv(num_items, PROGRAMS)
    first_item = tl.program_id(0) * each
    num_own = tl.minimum(each, num_items - first_item)
    lane = tl.arange(0, BM)
    row = lane // GROUP
    WIDTH: tl.constexpr = DIM // 2 if HAS_SCALES else DIM
    places = tl.arange(0, BLOCK)
    ones = tl.full((BLOCK, 16), 1.0, tl.float32).to(queries.dtype.element_ty)
    top = tl.full((BM,), LOWEST, tl.float32)
    weight_sum = tl.zeros((BM, 16), tl.float32)
    total = tl.zeros((BM, WIDTH), tl.float32)
    other = tl.zeros((BM, WIDTH), tl.float32)
    for step in range(num_own * PARTS):
        item = first_item + step // PARTS
        part = step % PARTS
        piece = item // KV_HEADS
        head = item % KV_HEADS
        block = tl.load(piece_blocks + piece * PARTS + part)
        sequence = tl.load(piece_sequences + piece)
        position = tl.load(piece_starts + piece) + part * BLOCK + places
        last = tl.load(piece_lasts + piece)
        limit = last - (ROWS - 1) + row
        source = (sequence * ROWS + row).to(tl.int64) * HEADS + head * GROUP + lane % GROUP
        query, other_query = _load_query(
            queries + source[:, None] * DIM, (row < ROWS)[:, None], DIM, HAS_SCALES
        )
        own = block.to(tl.int64) * KV_HEADS + head
        is_block = (block >= 0) & (places >= 0)
        key = load_slots(
            keys, key_scales, own, places, is_block, query.dtype, BLOCK, DIM, HAS_SCALES
        )
        # A slot after the sequence's end may hold NaN, and 0 times NaN is NaN.
        is_slot = is_block & (position <= last)
        value = load_slots(
            values, value_scales, own, places, is_slot, query.dtype, BLOCK, DIM, HAS_SCALES
        )
        is_first = part == 0
        top = tl.where(is_first, LOWEST, top)
        weight_sum = tl.where(is_first, 0.0, weight_sum)
        total = tl.where(is_first, 0.0, total)
        other = tl.where(is_first, 0.0, other)
        top, weight_sum, total, other = _advance(
            query, other_query, key, value, ones, _seen(position, limit, window), scale, top,
            weight_sum, total, other, HAS_SCALES,
        )  # fmt: skip
        if part == PARTS - 1:
            target = (item * BM + lane).to(tl.int64)
            is_row = row < ROWS
            _store_result(
                totals + target[:, None] * DIM, is_row[:, None], total, other, DIM, HAS_SCALES
            )
            tl.store(tops + target * 2, top, mask=is_row)
            tl.store(tops + target * 2 + 1, tl.max(weight_sum, 1), mask=is_row)


@triton.jit
def _with_sinks(sinks, heads, top, weight_sum):
    """Return what the rows' sums shrink by beside the sinks of their heads, and the sums of weights
    with them. `top` and `weight_sum` are of as many rows as `heads`."""
    sink = tl.load(sinks + heads) * LOG2_E
    new_top = tl.maximum(top, sink)
    fade = tl.exp2(top - new_top)
    return fade, weight_sum * fade + tl.exp2(sink - new_top)


# Merging is the same online softmax once more, over pieces: the sum of two parts is both, each
# times 2^(its own top - the larger top). A row merges the pieces up to its own position and no
# others, in ascending order, so what a sequence with drafts has in later pieces does not enter.
# With a window the list begins with the piece of the sequence's first row, and a row's own begin
# there or later. The division by the sum of weights comes last and once.
@triton.jit
def merge_pieces(totals, tops, last_positions, first_pieces, out, window, sinks,
                 ROWS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                 DIM: tl.constexpr, BM: tl.constexpr, PIECE: tl.constexpr,
                 IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Merge a row's own pieces in ascending order. One program is one (sequence, row, head)."""
    begin(IS_PROGRAMMATIC)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    sequence = tl.program_id(0)
    row = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    last = tl.load(last_positions + sequence)
    if last >= 0:
        first = tl.load(first_pieces + sequence)
        lanes = tl.arange(0, DIM)
        top = LOWEST
        weight_sum = 0.0
        total = tl.zeros((DIM,), tl.float32)
        own = last - (ROWS - 1) + row
        begin_piece = 0
        if window is not None:
            first -= tl.maximum(last - (ROWS - 1) - (window - 1), 0) // PIECE
            begin_piece = tl.maximum(own - (window - 1), 0) // PIECE
        for piece in range(begin_piece, own // PIECE + 1):
            item = (first + piece) * KV_HEADS + head // GROUP
            source = item.to(tl.int64) * BM + row * GROUP + head % GROUP
            piece_top = tl.load(tops + source * 2)
            new_top = tl.maximum(top, piece_top)
            fade = tl.exp2(top - new_top)
            gain = tl.exp2(piece_top - new_top)
            total = total * fade + tl.load(totals + source * DIM + lanes) * gain
            weight_sum = weight_sum * fade + tl.load(tops + source * 2 + 1) * gain
            top = new_top
        if sinks is not None:
            fade, weight_sum = _with_sinks(sinks, head, top, weight_sum)
            total = total * fade
        target = ((sequence * ROWS + row) * HEADS + head).to(tl.int64) * DIM
        tl.store(out + target + lanes, (total / weight_sum).to(out.dtype.element_ty))


# Chunks of prompts. There are enough rows to fill the card, so a program keeps its rows and walks
# all their keys: nothing is stored between pieces. It still computes each piece from nothing and
# merges it as `merge_pieces` does, instead of going on with the sums of the piece before: that is
# one merge in PIECE keys, and the reason why a row has the same bits in a chunk as in a decode. A
# tile's keys end with its own last row; rows before that are cut off by their `limit`. With a
# window they begin with the block of the first key that the tile's first row sees.
@triton.jit
def attend_chunk(queries, keys, values, key_scales, value_scales, tables, tile_sequences, tile_rows,
                 first_rows, num_rows, last_positions, out, scale, table_width, window, sinks,
                 HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
                 BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr,
                 HAS_SCALES: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Attention of many rows a sequence, pieces merged in registers. Program: (tile, KV head).

    Tile t holds the BM // (HEADS // KV_HEADS) query rows from `tile_rows[t]` on of the sequence
    `tile_sequences[t]`, whose rows begin at `first_rows` and end at `last_positions`.
    """
    begin(IS_PROGRAMMATIC)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tile_sequences + tile)
    first_row = tl.load(tile_rows + tile)
    count = tl.load(num_rows + sequence)
    last = tl.load(last_positions + sequence)
    lane = tl.arange(0, BM)
    row = first_row + lane // GROUP
    # Where the group does not divide the tile, the lanes after its last whole row are idle.
    is_row = ((row < count) & (lane < BM // GROUP * GROUP))[:, None]
    place = tl.load(first_rows + sequence).to(tl.int64) + row
    offsets = (place * HEADS + head * GROUP + lane % GROUP)[:, None] * DIM
    query, other_query = _load_query(queries + offsets, is_row, DIM, HAS_SCALES)
    limit = last - (count - 1) + row
    end = tl.minimum(last, last - (count - 1) + first_row + BM // GROUP - 1) + 1
    table = tables + sequence.to(tl.int64) * table_width
    top = tl.full((BM,), LOWEST, tl.float32)
    weight_sum = tl.zeros((BM, 16), tl.float32)
    total = tl.zeros((BM, query.shape[1]), tl.float32)
    other = tl.zeros((BM, query.shape[1]), tl.float32)
    seen = 0
    if window is not None:
        seen = tl.maximum(last - (count - 1) + first_row - (window - 1), 0) // BN * BN
    for start in range(seen // PIECE * PIECE, end, PIECE):
        begin_key = start
        if window is not None:
            begin_key = tl.maximum(start, seen)
        piece_top, piece_sum, piece_total, piece_other = _piece(
            query, other_query, keys, values, key_scales, value_scales, table, head, begin_key,
            tl.minimum(start + PIECE, end), limit, window, scale, KV_HEADS, DIM, BLOCK, BM, BN,
            HAS_SCALES,
        )  # fmt: skip
        new_top = tl.maximum(top, piece_top)
        fade = tl.exp2(top - new_top)[:, None]
        gain = tl.exp2(piece_top - new_top)[:, None]
        total = total * fade + piece_total * gain
        if HAS_SCALES:
            other = other * fade + piece_other * gain
        weight_sum = weight_sum * fade + piece_sum * gain
        top = new_top
    whole = tl.max(weight_sum, 1)
    if sinks is not None:
        fade, whole = _with_sinks(sinks, head * GROUP + lane % GROUP, top, whole)
        total = total * fade[:, None]
        if HAS_SCALES:
            other = other * fade[:, None]
    whole = whole[:, None]
    kind = out.dtype.element_ty
    _store_result(
        out + offsets, is_row, (total / whole).to(kind), (other / whole).to(kind), DIM, HAS_SCALES
    )
