"""Attention over cached keys: in pieces at fixed positions, merged in ascending order.

A piece is PIECE keys whose positions begin at a multiple of PIECE. Decoding computes the pieces of
a sequence in different programs, and `merge_pieces` merges them; a chunk's programs merge them in
registers. Both merge the same numbers in the same order, so they give the same bits. Inside a piece
the matrix unit adds everything that is added over keys, the sum of the softmax weights included (a
product with a column of ones), so the tile's shape does not enter either.

Rows of the matrix unit's tile are (query row, head of the group). Scores are in base 2: `scale`
contains log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin

LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def _advance(query, key, value, ones, is_key, scale, top, weight_sum, total):
    """Add a block of keys to a piece: its largest score, sum of weights, and weighted values."""
    scores = tl.dot(query, tl.trans(key)) * scale
    scores = tl.where(is_key, scores, LOWEST)
    new_top = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - new_top)
    weights = tl.where(is_key, tl.exp2(scores - new_top[:, None]), 0.0).to(query.dtype)
    weight_sum = tl.dot(weights, ones, weight_sum * fade[:, None])
    total = tl.dot(weights, value, total * fade[:, None])
    return new_top, weight_sum, total


@triton.jit
def _piece(query, keys, values, table, head, start, stop, limit, scale, KV_HEADS: tl.constexpr,
           DIM: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
           BN: tl.constexpr):  # fmt: skip
    """Return the largest score, the sum of weights and the weighted values of keys start to stop.

    `limit` [BM] is each row's own position: keys after it do not count.
    """
    lanes = tl.arange(0, DIM)
    places = tl.arange(0, BN)
    ones = tl.full((BN, 16), 1.0, tl.float32).to(query.dtype)
    top = tl.full((BM,), LOWEST, tl.float32)
    weight_sum = tl.zeros((BM, 16), tl.float32)
    total = tl.zeros((BM, DIM), tl.float32)
    for first in range(start, stop, BN):
        block = tl.load(table + first // BLOCK).to(tl.int64)
        rows = (block * KV_HEADS + head) * BLOCK + first % BLOCK + places
        offsets = rows[:, None] * DIM + lanes[None, :]
        key = tl.load(keys + offsets)
        value = tl.load(values + offsets, mask=(first + places < stop)[:, None], other=0.0)
        is_key = (first + places)[None, :] <= limit[:, None]
        top, weight_sum, total = _advance(
            query, key, value, ones, is_key, scale, top, weight_sum, total
        )
    return top, weight_sum, total


@triton.jit
def list_pieces(last_positions, tables, table_width, num_sequences, first_pieces, piece_sequences,
                piece_starts, piece_lasts, piece_blocks, BLOCK: tl.constexpr, PIECE: tl.constexpr,
                SEQUENCES: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """List the pieces of all sequences, once for all layers of a step. Program: sequence.

    `first_pieces` [SEQUENCES + 1] are the places of a sequence's pieces in the list, and the
    length of the list. Of each piece it holds the sequence, the piece's first position, the
    sequence's last one, and PIECE // BLOCK block ids (-1: behind the sequence's end). A last
    position of -1 is padding: no pieces.
    """
    begin(IS_PROGRAMMATIC)
    sequence = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    last = tl.load(last_positions + index, mask=index < num_sequences, other=-1)
    counts = tl.where(last >= 0, last // PIECE + 1, 0)
    first = tl.sum(tl.where(index < sequence, counts, 0), 0)
    own = tl.sum(tl.where(index == sequence, counts, 0), 0)
    tl.store(first_pieces + sequence, first)
    if sequence == num_sequences - 1:
        tl.store(first_pieces + num_sequences, first + own)
    last_own = tl.sum(tl.where(index == sequence, last, 0), 0)
    parts: tl.constexpr = PIECE // BLOCK
    part = tl.arange(0, parts)
    for piece in range(own):
        tl.store(piece_sequences + first + piece, sequence)
        tl.store(piece_starts + first + piece, piece * PIECE)
        tl.store(piece_lasts + first + piece, last_own)
        place = piece * parts + part
        is_block = place * BLOCK <= last_own
        block = tl.load(
            tables + sequence.to(tl.int64) * table_width + place, mask=is_block, other=-1
        )
        tl.store(piece_blocks + (first + piece) * parts + part, block)


@triton.jit
def attend_pieces(queries, keys, values, first_pieces, piece_sequences, piece_starts, piece_lasts,
                  piece_blocks, totals, tops, scale, num_sequences,
                  ROWS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                  DIM: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, PIECE: tl.constexpr,
                  PROGRAMS: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute every piece of every KV head; a fixed number of programs shares them out evenly.

    Each sequence has ROWS query rows. The results are `totals` [pieces, KV_HEADS, BM, DIM] and
    `tops` [pieces, KV_HEADS, BM, 2] (the largest score and the sum of weights). A program walks the
    blocks of all its pieces in one loop, so that the loads of the next piece are under way before
    the last one ends.
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
    lanes = tl.arange(0, DIM)
    places = tl.arange(0, BLOCK)
    ones = tl.full((BLOCK, 16), 1.0, tl.float32).to(queries.dtype.element_ty)
    top = tl.full((BM,), LOWEST, tl.float32)
    weight_sum = tl.zeros((BM, 16), tl.float32)
    total = tl.zeros((BM, DIM), tl.float32)
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
        query = tl.load(
            queries + source[:, None] * DIM + lanes[None, :], mask=(row < ROWS)[:, None], other=0.0
        )
        rows = (block.to(tl.int64) * KV_HEADS + head) * BLOCK + places
        offsets = rows[:, None] * DIM + lanes[None, :]
        # A slot behind the sequence's end may hold anything, and 0 times NaN is NaN.
        is_slot = (block >= 0) & (position <= last)
        key = tl.load(keys + offsets, mask=(block >= 0) & (places >= 0)[:, None], other=0.0)
        value = tl.load(values + offsets, mask=is_slot[:, None], other=0.0)
        is_first = part == 0
        top = tl.where(is_first, LOWEST, top)
        weight_sum = tl.where(is_first, 0.0, weight_sum)
        total = tl.where(is_first, 0.0, total)
        top, weight_sum, total = _advance(
            query, key, value, ones, position[None, :] <= limit[:, None], scale, top, weight_sum,
            total,
        )  # fmt: skip
        if part == PARTS - 1:
            target = (item * BM + lane).to(tl.int64)
            is_row = row < ROWS
            tl.store(totals + target[:, None] * DIM + lanes[None, :], total, mask=is_row[:, None])
            tl.store(tops + target * 2, top, mask=is_row)
            tl.store(tops + target * 2 + 1, tl.max(weight_sum, 1), mask=is_row)


@triton.jit
def merge_pieces(totals, tops, last_positions, first_pieces, out, ROWS: tl.constexpr,
                 HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BM: tl.constexpr,
                 PIECE: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
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
        for piece in range(own // PIECE + 1):
            item = (first + piece) * KV_HEADS + head // GROUP
            source = item.to(tl.int64) * BM + row * GROUP + head % GROUP
            piece_top = tl.load(tops + source * 2)
            new_top = tl.maximum(top, piece_top)
            fade = tl.exp2(top - new_top)
            gain = tl.exp2(piece_top - new_top)
            total = total * fade + tl.load(totals + source * DIM + lanes) * gain
            weight_sum = weight_sum * fade + tl.load(tops + source * 2 + 1) * gain
            top = new_top
        target = ((sequence * ROWS + row) * HEADS + head).to(tl.int64) * DIM
        tl.store(out + target + lanes, (total / weight_sum).to(out.dtype.element_ty))


@triton.jit
def attend_chunk(queries, keys, values, tables, tile_sequences, tile_rows, first_rows, num_rows,
                 last_positions, out, scale, table_width, HEADS: tl.constexpr,
                 KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr, PIECE: tl.constexpr,
                 IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
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
    lanes = tl.arange(0, DIM)
    row = first_row + lane // GROUP
    # Where the group does not divide the tile, the lanes after its last whole row are idle.
    is_row = ((row < count) & (lane < BM // GROUP * GROUP))[:, None]
    place = tl.load(first_rows + sequence).to(tl.int64) + row
    offsets = (place * HEADS + head * GROUP + lane % GROUP)[:, None] * DIM + lanes[None, :]
    query = tl.load(queries + offsets, mask=is_row, other=0.0)
    limit = last - (count - 1) + row
    end = tl.minimum(last, last - (count - 1) + first_row + BM // GROUP - 1) + 1
    table = tables + sequence.to(tl.int64) * table_width
    top = tl.full((BM,), LOWEST, tl.float32)
    weight_sum = tl.zeros((BM, 16), tl.float32)
    total = tl.zeros((BM, DIM), tl.float32)
    for start in range(0, end, PIECE):
        piece_top, piece_sum, piece_total = _piece(
            query, keys, values, table, head, start, tl.minimum(start + PIECE, end), limit, scale,
            KV_HEADS, DIM, BLOCK, BM, BN,
        )  # fmt: skip
        new_top = tl.maximum(top, piece_top)
        fade = tl.exp2(top - new_top)[:, None]
        gain = tl.exp2(piece_top - new_top)[:, None]
        total = total * fade + piece_total * gain
        weight_sum = weight_sum * fade + piece_sum * gain
        top = new_top
    result = (total / tl.max(weight_sum, 1)[:, None]).to(out.dtype.element_ty)
    tl.store(out + offsets, result, mask=is_row)
