"""The rows of a step in which every sequence computes its last known token: laid out in one call.

A dozen small array operations take longer than that, because the weights of the layers have driven
the interpreter from the processor's caches.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def lay_out_plain(  # type: ignore[no-untyped-def]
    rows, starts, seat_token_ids, seat_block_tables, seat_num_blocks, block_size, max_len,
    num_blocks, vocab_size,
):  # fmt: skip
    """Return token ids, positions, slots and block tables of `rows` of the seats, as int64.

    Row `i` computes the token at `starts[i]`. The fifth result is False if a position, a token or
    a block is outside the limits; then the others have no meaning.
    """
    count = len(rows)
    width = 0
    for i in range(count):
        held = seat_num_blocks[rows[i]]
        width = max(width, held)
        if not 0 <= starts[i] < min(held * block_size, max_len):
            width = -1
            break
    token_ids = np.empty(count, np.int64)
    positions = starts.copy()
    slots = np.empty(count, np.int64)
    block_tables = np.empty((count, max(width, 0)), np.int64)
    if width < 0:
        return token_ids, positions, slots, block_tables, False
    is_good = True
    for i in range(count):
        row, start = rows[i], starts[i]
        for index in range(width):
            block_id = np.int64(seat_block_tables[row, index])
            block_tables[i, index] = block_id
            is_good &= 0 <= block_id < num_blocks
        token_id = np.int64(seat_token_ids[row, start])
        token_ids[i] = token_id
        is_good &= 0 <= token_id < vocab_size
        index = start // block_size
        slots[i] = block_tables[i, index] * block_size + start - index * block_size
    return token_ids, positions, slots, block_tables, is_good
