"""The rows of a step and the draws after them, laid out from its seats in one call each.

A dozen small array operations take longer than that, because the weights of the layers have driven
the interpreter from the processor's caches.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def lay_out_rows(  # type: ignore[no-untyped-def]
    seats, starts, num_tokens, num_drafts, is_sampled, seat_token_ids, seat_block_tables,
    seat_num_blocks, block_size, max_tokens, max_len, num_blocks, vocab_size, row_starts,
):  # fmt: skip
    """Return token ids, positions, slots, block tables and sampled rows, as int64.

    Entry `i` computes `num_tokens[i]` tokens of seat `seats[i]` from `starts[i]` on. Its first row
    is written to `row_starts[i]`, and after those the number of rows. The sixth result is
    False if anything is outside the limits; then all else has no meaning.
    """
    count = len(seats)
    row_starts[0] = 0
    width = num_sampled = 0
    is_good = True
    for i in range(count):
        start, num, drafts = starts[i], num_tokens[i], num_drafts[i]
        held = seat_num_blocks[seats[i]]
        width = max(width, held)
        is_good &= start >= 0 and start + num <= min(held * block_size, max_len)
        is_good &= 0 <= drafts < num and (is_sampled[i] or drafts == 0)
        num_sampled += drafts + 1 if is_sampled[i] else 0
        row_starts[i + 1] = row_starts[i] + num
    is_good &= row_starts[count] <= max_tokens
    if not is_good:
        count = num_sampled = 0
    num_rows = row_starts[count]
    token_ids = np.empty(num_rows, np.int64)
    positions = np.empty(num_rows, np.int64)
    slots = np.empty(num_rows, np.int64)
    block_tables = np.empty((count, width), np.int64)
    sampled_rows = np.empty(num_sampled, np.int64)
    sampled = 0
    for i in range(count):
        seat, start, first, end = seats[i], starts[i], row_starts[i], row_starts[i + 1]
        for index in range(width):
            block_id = np.int64(seat_block_tables[seat, index])
            block_tables[i, index] = block_id
            is_good &= 0 <= block_id < num_blocks
        for row in range(first, end):
            position = start + row - first
            token_id = np.int64(seat_token_ids[seat, position])
            token_ids[row] = token_id
            is_good &= 0 <= token_id < vocab_size
            positions[row] = position
            index = position // block_size
            slots[row] = block_tables[i, index] * block_size + position - index * block_size
        if is_sampled[i]:
            for row in range(end - num_drafts[i] - 1, end):
                sampled_rows[sampled] = row
                sampled += 1
        else:
            # A drafting layer reads the known token after a chunk; -1: there is none.
            is_good &= seat_token_ids[seat, start + end - first] < vocab_size
    return token_ids, positions, slots, block_tables, sampled_rows, is_good


@njit(nogil=True, cache=True)
def lay_out_draws(seats, num_drafts, is_sampled, seat_num_known):  # type: ignore[no-untyped-def]
    """Return the seat of each draw and the number of tokens before it, as int64."""
    count = 0
    for i in range(len(seats)):
        if is_sampled[i]:
            count += num_drafts[i] + 1
    histories, num_tokens = np.empty(count, np.int64), np.empty(count, np.int64)
    draw = 0
    for i in range(len(seats)):
        if is_sampled[i]:
            for num_before in range(num_drafts[i] + 1):
                histories[draw] = seats[i]
                num_tokens[draw] = seat_num_known[seats[i]] + num_before
                draw += 1
    return histories, num_tokens
