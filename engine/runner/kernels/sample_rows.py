"""Draw the next tokens of all rows of a step at once, a share of the rows on each thread.

A row is drawn by one thread, from its own logits, parameters and tokens alone; see `sampler` for
the rules. Filters look at a *shortlist* first, the few tokens within some nats of the likeliest: it
usually holds every token that is kept. If it does not, they look at the whole row.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange, uint32, uint64

from engine.runner.kernels.filters import (
    cannot_win,
    draw,
    gumbel_noise,
    kept_prefix,
    top_k_end,
    top_p_end,
)
from engine.runner.kernels.philox import philox_at
from engine.runner.kernels.vector_ir import LANES
from engine.runner.kernels.weights import (
    SHORTLIST_DEPTHS,
    below_mask,
    lowest_bit,
    sum_weights,
    write_weights,
)

# Below this the division would leave float32's range. The largest logit would be drawn anyway
# unless another one is within 1e-4 of it.
GREEDY_BELOW = 1e-5

DRAWN, NOT_FINITE, NO_TOKEN_LEFT = 0, 1, 2
"""What became of a row."""

_SHORTLIST = 1 << 15
"""The most tokens of a shortlist."""
_FEW = 4096
"""Of more kept tokens the noise is computed for stripes of the vocabulary, which is faster."""
_BLOCK = 64
_EXPONENT = 0x7F800000


class Scratch:
    """Memory of one row's work for each of `num_threads` threads, allocated once."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        width = -(-vocab_size // _BLOCK) * _BLOCK
        self.num_threads = num_threads
        self.values = np.zeros((num_threads, width), np.float32)
        self.depths = np.full((num_threads, width), np.inf, np.float32)
        self.weights = np.zeros((num_threads, width), np.float32)
        self.counts = np.zeros((num_threads, vocab_size), np.int32)
        self.listed_ids = np.zeros((num_threads, _SHORTLIST), np.int32)
        self.listed = np.zeros((num_threads, 2, _SHORTLIST), np.float32)
        self.shallow = np.zeros((num_threads, len(SHORTLIST_DEPTHS)), np.float64)


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
def _is_finite(values: np.ndarray) -> bool:
    bits = values.view(np.int32)
    num_wrong = 0
    for i in range(len(bits)):
        num_wrong += (bits[i] & _EXPONENT) == _EXPONENT
    return num_wrong == 0


@njit(nogil=True, cache=True, error_model="numpy")
def _likeliest(values: np.ndarray) -> int:
    """Return the lowest id of the largest value; no value is NaN.

    The largest is found in the order of bits, for which the compiler uses vectors.
    """
    bits = values.view(np.int32)
    best = np.int32(-(2**31))
    for i in range(len(bits)):
        key = bits[i] ^ ((bits[i] >> 31) & np.int32(0x7FFFFFFF))
        best = max(best, key)
    found = np.empty(1, np.int32)
    found[0] = best ^ ((best >> 31) & np.int32(0x7FFFFFFF))
    largest = found.view(np.float32)[0]
    for i in range(len(values)):
        if values[i] == largest:  # also the other zero: -0 equals 0
            return i
    return 0


@njit(nogil=True, cache=True, error_model="numpy")
def _list_shallow(depths, within, ids, listed) -> int:  # type: ignore[no-untyped-def]
    """List the tokens of a depth below `within`, by id; return their number, -1: too many.

    `depths` is a whole number of blocks long.
    """
    num = 0
    for start in range(0, len(depths), _BLOCK):
        mask = below_mask(depths[start:].ctypes.data, np.float32(within))
        while mask != 0:
            if num == len(ids):
                return -1
            at = start + lowest_bit(mask)
            ids[num], listed[num] = at, depths[at]
            num += 1
            mask &= mask - 1
    return num


@njit(nogil=True, cache=True, error_model="numpy")
def _kept_of_shortlist(vocab_size, depths, total, shallow, way, ids, listed):  # type: ignore[no-untyped-def]
    """Return the end (depth, id) of what the filters keep, and the shortlist's length.

    The length is -1 if no shortlist holds all kept tokens.
    """
    has_top_k = 0 < way["top_k"] < vocab_size
    shallowest_kept = -math.log(way["min_p"]) if way["min_p"] > 0.0 else np.inf
    is_whole = way["top_p"] < 1.0 and not has_top_k
    for number, within in enumerate(SHORTLIST_DEPTHS):
        if is_whole and shallow[number] < way["top_p"] * total:
            continue
        num = _list_shallow(depths, within, ids, listed[0])
        if num < 0:
            break
        few = listed[0, :num]
        last_depth, last = np.inf, num
        if has_top_k:
            if num < way["top_k"]:
                continue
            last_depth, last = top_k_end(few, way["top_k"])
        if way["top_p"] < 1.0:
            few_vectors = -(-num // LANES)  # the places behind the list are there, and not read
            write_weights(listed[0].ctypes.data, listed[1].ctypes.data, few_vectors)
            whole = total if is_whole else -1.0
            last_depth, last = top_p_end(
                few, listed[1, :num], way["top_p"], whole, last_depth, last
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
def _draw_listed(ids, listed, last_depth, last_id, seed, output_index):  # type: ignore[no-untyped-def]
    """Return what `draw` does, of the kept tokens of a shortlist; -1 if these are not few."""
    kept = np.empty(_FEW, np.int32)
    num_kept = 0
    for i in range(len(ids)):
        if listed[i] < last_depth or (listed[i] == last_depth and ids[i] <= last_id):
            if num_kept == _FEW:
                return -1
            kept[num_kept] = i
            num_kept += 1
    words = np.empty((4, num_kept), np.uint32)
    for n in range(num_kept):
        words[0, n] = uint32(ids[kept[n]] // 4)
    philox_at(words, output_index, seed)
    best, best_id = -np.inf, -1
    for n in range(num_kept):
        token_id, depth = ids[kept[n]], listed[kept[n]]
        word = words[token_id & 3, n]
        if cannot_win(word, best + depth):
            continue
        score = gumbel_noise(word) - depth
        if score > best:
            best, best_id = score, token_id
    return best_id


@njit(nogil=True, cache=True, error_model="numpy")
def _sample_row(values, largest, way, output_index, depths, weights, shallow, ids, listed):  # type: ignore[no-untyped-def]
    """Return a drawn token; `depths` and `weights` are a whole number of blocks long."""
    vocab_size = len(values)
    temperature = np.float32(way["temperature"])
    for i in range(vocab_size):
        depths[i] = (largest - values[i]) / temperature
    row = depths[:vocab_size]
    total = 0.0
    if way["top_p"] < 1.0:
        num_vectors = len(depths) // LANES
        total = sum_weights(depths.ctypes.data, num_vectors, shallow.ctypes.data)
    seed, index = uint64(way["seed"]), uint32(output_index)
    has_filter = 0 < way["top_k"] < vocab_size or way["top_p"] < 1.0 or way["min_p"] > 0.0
    if not has_filter:
        return draw(row, np.inf, vocab_size, seed, index)
    last_depth, last_id, num = _kept_of_shortlist(
        vocab_size, depths, total, shallow, way, ids, listed
    )
    if num >= 0:
        token_id = _draw_listed(ids[:num], listed[0, :num], last_depth, last_id, seed, index)
        if token_id >= 0:
            return token_id
    else:
        write_weights(depths.ctypes.data, weights.ctypes.data, len(depths) // LANES)
        last_depth, last_id = kept_prefix(
            row, weights[:vocab_size], total, way["top_k"], way["top_p"], way["min_p"]
        )
    return draw(row, last_depth, last_id, seed, index)


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def sample_rows(  # type: ignore[no-untyped-def]
    logits, ways, output_indices, token_ids, histories, num_prompts, num_tokens, withheld_starts,
    withheld_ids, values, depths, weights, shallow, counts, listed_ids, listed, drawn, outcomes,
) -> None:  # fmt: skip
    """Draw `drawn[r]` from `logits[r]`, which is not changed; `outcomes[r]` says if it was.

    `ways` has `SAMPLING_COLUMNS`. The tokens before row r are the first `num_tokens[r]` of
    `token_ids[histories[r]]`, `num_prompts[r]` of them the prompt's. It must not draw
    `withheld_ids[withheld_starts[r]:withheld_starts[r + 1]]`.
    """
    num_threads = len(values)
    vocab_size = logits.shape[1]
    for member in prange(num_threads):
        for r in range(member, len(logits), num_threads):
            way, row = ways[r], logits[r]
            first, end = withheld_starts[r], withheld_starts[r + 1]
            is_penalised = (
                way["repetition_penalty"] != 1.0
                or way["frequency_penalty"] != 0.0
                or way["presence_penalty"] != 0.0
            )
            if is_penalised or first < end:
                row = values[member, :vocab_size]
                row[:] = logits[r]
            if is_penalised:
                history = token_ids[histories[r]]
                _penalise(row, counts[member], way, history, num_prompts[r], num_tokens[r])
            if not _is_finite(row):
                outcomes[r] = NOT_FINITE
                continue
            for i in range(first, end):
                row[withheld_ids[i]] = -np.inf
            likeliest = _likeliest(row)
            if row[likeliest] == -np.inf:
                outcomes[r] = NO_TOKEN_LEFT
                continue
            outcomes[r] = DRAWN
            drawn[r] = likeliest
            if way["temperature"] >= GREEDY_BELOW:
                drawn[r] = _sample_row(
                    row, row[likeliest], way, output_indices[r], depths[member], weights[member],
                    shallow[member], listed_ids[member], listed[member],
                )  # fmt: skip
