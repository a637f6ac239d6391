"""Draw the next tokens of all rows of a step at once, one row after another on each thread.

A row is drawn by one thread, from its own logits, parameters and tokens alone; see `sampler` for
the rules. Filters look at a *shortlist* first, the few tokens within some nats of the likeliest: it
usually holds every token that is kept. If it does not, they look at the whole row.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, uint32, uint64

from common.request import GREEDY_BELOW
from engine.runner.kernels.sampling.draw import draw, draw_listed
from engine.runner.kernels.sampling.filters import kept_prefix, top_k_end, top_p_end
from engine.runner.kernels.sampling.row_scan import (
    BLOCK,
    copy_blocks,
    count_bits,
    least_shallow,
    lowest_bit,
    mask_from,
    scan_blocks,
)
from engine.runner.kernels.sampling.top_p_weights import (
    MOST_TEMPERATURE,
    SHALLOW_ROW,
    SHORTLIST_DEPTHS,
    add_shallow_weights,
    add_weights,
    write_weights,
)
from engine.runner.kernels.team import claim, new_progress, run_team
from engine.runner.kernels.vector_ir import LANES

DRAWN, NOT_FINITE, NO_TOKEN_LEFT = 0, 1, 2
"""What became of a row."""

_INFINITY = 0x7F800000
"""The bits of infinity; those of a NaN without its sign are above."""
_SHORTLIST = 1 << 15
"""The most tokens of a shortlist."""


class Scratch:
    """Memory of one row's work for each of `num_threads` threads, allocated once."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        num_blocks = -(-vocab_size // BLOCK)
        self.num_threads = num_threads
        self.values = np.zeros((num_threads, vocab_size), np.float32)
        self.maxima = np.zeros((num_threads, num_blocks), np.float32)
        self.depths = np.zeros((num_threads, num_blocks * BLOCK), np.float32)
        self.weights = np.zeros((num_threads, num_blocks * BLOCK), np.float32)
        self.sums = np.zeros((num_threads, LANES), np.float64)
        self.shallow = np.zeros((num_threads, len(SHORTLIST_DEPTHS), LANES), np.float32)
        self.counts = np.zeros((num_threads, vocab_size), np.int32)
        self.listed_ids = np.zeros((num_threads, _SHORTLIST), np.int32)
        self.listed = np.zeros((num_threads, 2, _SHORTLIST), np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _penalise(values, counts, way, token_ids, num_prompt, num_tokens) -> None:  # type: ignore[no-untyped-def]
    """Apply repetition, frequency and presence penalties; `counts` is zero before and after."""
    if way["repetition_penalty"] != 1.0:
        penalty = np.float32(way["repetition_penalty"])
        for i in range(num_tokens):
            token_id = token_ids[i]
            if counts[token_id] == 0:
                counts[token_id] = 1
                value = values[token_id]
                values[token_id] = value / penalty if value > 0 else value * penalty
        for i in range(num_tokens):
            counts[token_ids[i]] = 0
    if way["frequency_penalty"] != 0.0 or way["presence_penalty"] != 0.0:
        for i in range(num_prompt, num_tokens):
            counts[token_ids[i]] += 1
        for i in range(num_prompt, num_tokens):
            token_id = token_ids[i]
            if counts[token_id]:
                penalty = way["frequency_penalty"] * counts[token_id] + way["presence_penalty"]
                values[token_id] -= np.float32(penalty)
                counts[token_id] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def _scan(values, maxima, copies):  # type: ignore[no-untyped-def]
    """Find the largest value of each block; return the bits of the largest magnitude.

    They are not below those of infinity if a value is NaN or infinite. A non-empty `copies` becomes
    a copy of the row.
    """
    num_whole = len(values) // BLOCK
    most = np.int32(0)
    at, maxima_at = values.ctypes.data, maxima.ctypes.data
    if num_whole and len(copies):
        most = copy_blocks(at, num_whole, maxima_at, copies.ctypes.data)
    elif num_whole:
        most = scan_blocks(at, num_whole, maxima_at)
    if num_whole < len(maxima):
        if len(copies):
            # A loop: numba compiles an assignment of slices with the text of its error.
            for i in range(num_whole * BLOCK, len(values)):
                copies[i] = values[i]
        most = max(most, _scan_last(values, maxima))
    return most


@njit(nogil=True, cache=True, error_model="numpy")
def _scan_last(values, maxima):  # type: ignore[no-untyped-def]
    """Do what `_scan` does with the last block, which is not a whole one."""
    last, most, bits = len(maxima) - 1, np.int32(0), values.view(np.int32)
    maxima[last] = -np.inf
    for i in range(last * BLOCK, len(values)):
        most = max(most, bits[i] & np.int32(0x7FFFFFFF))
        maxima[last] = max(maxima[last], values[i])
    return most


@njit(nogil=True, cache=True, error_model="numpy")
def _scan_again(values, maxima, token_ids):  # type: ignore[no-untyped-def]
    """Do what `_scan` does where these tokens' values have changed; only their blocks count.

    A whole row is read as fast as a quarter of its blocks one by one.
    """
    if len(token_ids) > len(maxima) // 4:
        return _scan(values, maxima, values[:0])
    num_whole = len(values) // BLOCK
    most = np.int32(0)
    at, maxima_at = values.ctypes.data, maxima.ctypes.data
    for token_id in token_ids:
        block = np.int64(token_id // BLOCK)
        if block < num_whole:
            own = scan_blocks(at + 4 * BLOCK * block, 1, maxima_at + 4 * block)
        else:
            own = _scan_last(values, maxima)
        most = max(most, own)
    return most


@njit(nogil=True, cache=True, error_model="numpy")
def _largest(maxima) -> float:  # type: ignore[no-untyped-def]
    largest = maxima[0]
    for i in range(len(maxima)):
        largest = max(largest, maxima[i])
    return largest


@njit(nogil=True, cache=True, error_model="numpy")
def _likeliest(values, maxima, largest) -> int:  # type: ignore[no-untyped-def]
    """Return the lowest id of the largest value."""
    for number in range(len(maxima)):
        if maxima[number] == largest:  # also the other zero: -0 equals 0
            for i in range(number * BLOCK, len(values)):
                if values[i] == largest:
                    return i
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def _list_shallow(values, maxima, largest, temperature, within, ids, listed) -> int:  # type: ignore[no-untyped-def]
    """List the tokens of a depth below `within`, by id; return their number, -1: too many."""
    least = least_shallow(largest, temperature, np.float32(within))
    num_whole = len(values) // BLOCK
    num = 0
    for number in range(len(maxima)):
        if maxima[number] < least:
            continue
        start = number * BLOCK
        if number < num_whole:
            mask = mask_from(values[start:].ctypes.data, least)
        else:
            mask = 0
            for i in range(start, len(values)):
                if values[i] >= least:
                    mask |= 1 << (i - start)
        if num + BLOCK > len(ids):
            return -1
        end = num + count_bits(mask)
        while True:
            # Four at a time, whether there are so many or not: a branch for each token would often
            # be mispredicted. What is written after `end` is not read.
            for i in range(num, num + 4):
                at = start + lowest_bit(mask)
                ids[i], listed[i] = at, (largest - values[at]) / temperature
                mask &= mask - 1
            num += 4
            if num >= end:
                break
        num = end
    return num


@njit(nogil=True, cache=True, error_model="numpy")
def total_weight(  # type: ignore[no-untyped-def]
    values, largest, floor, temperature, depths, tail, sums, shallow, following
) -> float:
    """Return the sum of all weights; leave those of shallow tokens in `shallow[:, 0]`.

    A sum has a chain for each lane of a vector, and the chains are added in order. `depths` has
    room for the row, and `tail` for a block. No value is below `floor`.
    """
    sums[:] = 0.0
    shallow[:] = np.float32(0.0)
    if temperature > MOST_TEMPERATURE:
        for i in range(len(values)):
            depths[i] = -((largest - values[i]) / temperature)
        values, largest, temperature = depths[: len(values)], np.float32(0.0), np.float32(1.0)
        floor = np.float32(-np.inf)
    num_whole = len(values) // LANES
    at, shallow_at = sums.ctypes.data, shallow.ctypes.data
    if num_whole and (largest - floor) / temperature <= SHALLOW_ROW:
        add_shallow_weights(
            values.ctypes.data, num_whole, largest, temperature, at, shallow_at, following
        )
    elif num_whole:
        add_weights(values.ctypes.data, num_whole, largest, temperature, at, shallow_at, following)
    rest = len(values) - num_whole * LANES
    if rest:
        tail[:LANES] = -np.inf
        for i in range(rest):
            tail[i] = values[num_whole * LANES + i]
        add_weights(tail.ctypes.data, 1, largest, temperature, at, shallow_at, following)
    total = sums[0]
    for lane in range(1, LANES):
        total += sums[lane]
        for number in range(len(shallow)):
            shallow[number, 0] += shallow[number, lane]
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _kept_of_shortlist(  # type: ignore[no-untyped-def]
    values, maxima, largest, temperature, way, total, shallow, ids, listed
):
    """Return the end (depth, id) of what the filters keep, and the shortlist's length.

    The length is -1 if no shortlist holds all kept tokens. `total` is below 0 if top-p does not
    look at the weight of the whole row.
    """
    vocab_size = len(values)
    has_top_k = 0 < way["top_k"] < vocab_size
    shallowest_kept = -math.log(way["min_p"]) if way["min_p"] > 0.0 else np.inf
    for number, within in enumerate(SHORTLIST_DEPTHS):
        if total >= 0.0 and shallow[number, 0] < way["top_p"] * total:
            continue
        num = _list_shallow(values, maxima, largest, temperature, within, ids, listed[0])
        if num < 0:
            break
        few = listed[0, :num]
        last_depth, last = np.inf, num
        if has_top_k:
            if num < way["top_k"]:
                continue
            last_depth, last = top_k_end(few, way["top_k"])
        if way["top_p"] < 1.0:
            few_vectors = -(-num // LANES)  # entries after the list exist and are not read
            write_weights(listed[0].ctypes.data, listed[1].ctypes.data, few_vectors)
            last_depth, last = top_p_end(
                few, listed[1, :num], way["top_p"], total, last_depth, last
            )
            if last < 0:
                continue
        elif not has_top_k and shallowest_kept >= within:
            continue
        last_id = ids[last] if last < num else vocab_size
        if last_depth > shallowest_kept:
            last_depth, last_id = shallowest_kept, vocab_size
        return last_depth, last_id, num
    return np.inf, vocab_size, -1


@njit(nogil=True, cache=True, error_model="numpy")
def _sample_row(  # type: ignore[no-untyped-def]
    values, maxima, largest, floor, way, output_index, depths, weights, sums, shallow, ids, listed,
    following,
):  # fmt: skip
    """Return a drawn token; `depths` and `weights` are a whole number of vectors long.

    No value is below `floor`. `following` is the address of the next row.
    """
    vocab_size = len(values)
    temperature = np.float32(way["temperature"])
    seed, index = uint64(way["seed"]), uint32(output_index)
    has_top_k = 0 < way["top_k"] < vocab_size
    last_depth, last_id, num, total = np.inf, vocab_size, -1, -1.0
    has_filter = has_top_k or way["top_p"] < 1.0 or way["min_p"] > 0.0
    if has_filter:
        if way["top_p"] < 1.0 and not has_top_k:
            total = total_weight(
                values, largest, floor, temperature, depths, weights, sums, shallow, following
            )
        last_depth, last_id, num = _kept_of_shortlist(
            values, maxima, largest, temperature, way, total, shallow, ids, listed
        )
        if num >= 0:
            token_id = draw_listed(ids[:num], listed[0, :num], last_depth, last_id, seed, index)
            if token_id >= 0:
                return token_id
    if has_filter and num < 0:
        row = depths[:vocab_size]
        for i in range(vocab_size):
            row[i] = (largest - values[i]) / temperature
        write_weights(depths.ctypes.data, weights.ctypes.data, len(depths) // LANES)
        last_depth, last_id = kept_prefix(
            row, weights[:vocab_size], total, way["top_k"], way["top_p"], way["min_p"]
        )
    return draw(values, maxima, largest, temperature, last_depth, last_id, seed, index, following)


@njit(nogil=True, cache=True, error_model="numpy")
def _draw_row(  # type: ignore[no-untyped-def]
    logits_row, way, output_index, history, num_prompt, num_tokens, withheld, values, maxima,
    depths, weights, sums, shallow, counts, ids, listed, following,
):  # fmt: skip
    """Return what became of a row and its token, 0 without one.

    `following` is the address of the row that this thread looks at next.
    """
    row = logits_row
    is_penalised = (
        way["repetition_penalty"] != 1.0
        or way["frequency_penalty"] != 0.0
        or way["presence_penalty"] != 0.0
    )
    has_changes = is_penalised or len(withheld) > 0
    if has_changes:
        row = values[: len(logits_row)]
    most = _scan(logits_row, maxima, row if has_changes else values[:0])
    if is_penalised and most < _INFINITY:
        _penalise(row, counts, way, history, num_prompt, num_tokens)
        first = 0 if way["repetition_penalty"] != 1.0 else num_prompt
        most = max(most, _scan_again(row, maxima, history[first:num_tokens]))
    if most >= _INFINITY:
        return NOT_FINITE, 0
    if len(withheld):
        for token_id in withheld:
            row[token_id] = -np.inf
        most = _scan_again(row, maxima, withheld)
    largest = _largest(maxima)
    if largest == -np.inf:
        return NO_TOKEN_LEFT, 0
    if way["temperature"] < GREEDY_BELOW:
        return DRAWN, _likeliest(row, maxima, largest)
    bits = np.empty(1, np.int32)
    bits[0] = most
    floor = -bits.view(np.float32)[0]
    return DRAWN, _sample_row(
        row, maxima, largest, floor, way, output_index, depths, weights, sums, shallow, ids, listed,
        following,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _draw_rows(  # type: ignore[no-untyped-def]
    member, counters, logits, ways, output_indices, token_ids, histories, num_prompts, num_tokens,
    withheld_starts, withheld_ids, values, maxima, depths, weights, sums, shallow, counts,
    listed_ids, listed, drawn, outcomes,
) -> None:  # fmt: skip
    r = claim(counters)
    while r < len(logits):
        is_ahead = r + 2 * len(values) < len(logits)
        next_row = claim(counters) if is_ahead else r
        outcomes[r], drawn[r] = _draw_row(
            logits[r], ways[r], output_indices[r], token_ids[histories[r]], num_prompts[r],
            num_tokens[r], withheld_ids[withheld_starts[r] : withheld_starts[r + 1]],
            values[member], maxima[member], depths[member], weights[member], sums[member],
            shallow[member], counts[member], listed_ids[member], listed[member],
            logits[min(next_row, len(logits) - 1)].ctypes.data,
        )  # fmt: skip
        r = next_row if is_ahead else claim(counters)


@njit(nogil=True, cache=True, error_model="numpy")
def sample_rows(  # type: ignore[no-untyped-def]
    logits, ways, output_indices, token_ids, histories, num_prompts, num_tokens, withheld_starts,
    withheld_ids, values, maxima, depths, weights, sums, shallow, counts, listed_ids, listed, drawn,
    outcomes,
) -> None:  # fmt: skip
    """Draw `drawn[r]` from `logits[r]`, which is not changed; `outcomes[r]` says if it was.

    `ways` has `SAMPLING_COLUMNS`. The tokens before row r are the first `num_tokens[r]` of
    `token_ids[histories[r]]`, `num_prompts[r]` of them the prompt's. It must not draw
    `withheld_ids[withheld_starts[r]:withheld_starts[r + 1]]`. Each thread claims the next row, so
    that a thread that the system has paused delays the others by no more than two rows: while
    enough are left, it claims one ahead, and brings it into the cache while it computes.
    """
    run_team(
        _draw_rows, len(values),
        (
            new_progress(1)[0], logits, ways, output_indices, token_ids, histories, num_prompts,
            num_tokens, withheld_starts, withheld_ids, values, maxima, depths, weights, sums,
            shallow, counts, listed_ids, listed, drawn, outcomes,
        ),
    )  # fmt: skip
