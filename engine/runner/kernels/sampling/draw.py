"""The draw of one token: Gumbel-max, with noise of (seed, output index, token) alone.

The score of token v is noise - depth[v] (`filters` says what a depth is), and the kept token with
the largest score is drawn, the lowest id among equals: token v with probability exp(-depth[v]) over
the sum of the kept. The noise of vocabulary entry v at output index i of a request with seed s is
that of word `v % 4` of the Philox block with key s and counter (v // 4, i, 0, 0). Seeded clients
rely on this: changing it changes their answers.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numba import uint32

from engine.runner.kernels.sampling.philox import largest_word, philox_at, philox_blocks
from engine.runner.kernels.sampling.row_scan import BLOCK
from engine.runner.kernels.vector_ir import prefetch_line

# Noise is computed for a stripe of this many tokens together, or not at all.
_STRIPE = 256
_STRIPE_BLOCKS = _STRIPE // BLOCK
_LINE = 16  # floats of a cache line
_FEW = 4096
"""Most kept tokens whose noise is computed one by one; for more, in stripes of the vocabulary."""

# The largest possible noise: the largest word gives -log(-log(1 - 2**-33)) = 22.87.
_MAX_NOISE = 23.0
_WORD = 2.0**-32
_LOWEST = -1e300
# _RACE_BOUND[n + 1] >= exp(-t) for every t >= n >= 0, including rounding of the draw's logarithms.
# The first entry, for t < 0, passes every word; the last one passes none.
_RACE_BOUND = np.exp(-np.arange(-1.0, _MAX_NOISE + 1.0)) * (1.0 + 1e-9)


@numba.njit("float64(uint32)", nogil=True, cache=True)
def gumbel_noise(word: int) -> float:
    """Return standard Gumbel noise of one random word: -log(-log(u)), u = (word + 1/2) / 2**32."""
    return -math.log(-math.log((word + 0.5) * _WORD))


@numba.njit("boolean(uint32, float64)", nogil=True, cache=True)
def _cannot_win(word: int, lead: float) -> bool:
    """Return whether the noise of `word` is certainly no larger than `lead`, without a logarithm.

    Noise must exceed t, that is -log(u) < exp(-t), and -log(u) is at least 1 - u.
    """
    needed = min(max(lead, -1.0), _MAX_NOISE)
    return 1.0 - (word + 0.5) * _WORD > _RACE_BOUND[int(needed + 1.0)]


@numba.njit("uint32(float64)", nogil=True, cache=True)
def _least_word(lead: float) -> int:
    """Return a word below which `_cannot_win` holds for this lead: a little too small."""
    needed = min(max(lead, -1.0), _MAX_NOISE)
    return uint32(max(0.0, (1.0 - _RACE_BOUND[int(needed + 1.0)]) / _WORD - 2.0))


@numba.njit("float32(float32[::1], int64)", nogil=True, cache=True)
def _largest_of_stripe(maxima: np.ndarray, stripe: int) -> float:
    first = stripe * _STRIPE_BLOCKS
    largest = maxima[first]
    for number in range(first + 1, min(first + _STRIPE_BLOCKS, len(maxima))):
        largest = max(largest, maxima[number])
    return largest


@numba.njit("int64(float32[::1], float32)", nogil=True, cache=True)
def _stripe_of_likeliest(maxima: np.ndarray, largest: float) -> int:
    number = 0
    while maxima[number] != largest:
        number += 1
    return number // _STRIPE_BLOCKS


@numba.njit(
    "int64(float32[::1], float32[::1], float32, float32, float64, int64, uint64, uint32, int64)",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def draw(
    values: np.ndarray,
    maxima: np.ndarray,
    largest: float,
    temperature: float,
    last_depth: float,
    last_id: int,
    seed: int,
    output_index: int,
    following: int,
) -> int:
    """Return the token drawn from a row, of those up to rank (`last_depth`, `last_id`).

    `maxima` has the largest of each `BLOCK` values. Meanwhile the row at address `following` is
    brought into the cache.

    Most tokens, and most stripes of tokens, cannot win and are skipped, which changes no result: a
    division never changes an order, so a stripe's largest value gives its smallest depth, and that
    and the largest word of the stripe bound every score in it. The stripe of a likeliest token is
    first: after it, more can be skipped.
    """
    # Finite, so that an infinite depth never wins. The difference would be NaN, which passes every
    # comparison with the bound.
    best, best_id = _LOWEST, len(values)
    words = np.empty((4, _STRIPE // 4), np.uint32)
    first = _stripe_of_likeliest(maxima, largest)
    for turn in range(-1, -(-len(values) // _STRIPE)):
        stripe = first if turn < 0 else turn
        if turn == first:
            continue
        start = stripe * _STRIPE
        for at in range(start, start + _STRIPE, _LINE):
            prefetch_line(following + 4 * at)
        shallowest = (largest - _largest_of_stripe(maxima, stripe)) / temperature
        if shallowest > last_depth or best + shallowest >= _MAX_NOISE:
            continue
        counter, least_word = uint32(start // 4), _least_word(best + shallowest)
        if largest_word(counter, _STRIPE // 4, output_index, seed) < least_word:
            continue
        philox_blocks(words, counter, output_index, seed)
        for token_id in range(start, min(start + _STRIPE, len(values))):
            at = token_id - start
            word = words[at & 3, at >> 2]
            if word < least_word:
                continue
            depth = (largest - values[token_id]) / temperature
            if _cannot_win(word, best + depth):
                continue
            if depth > last_depth or (depth == last_depth and token_id > last_id):
                continue
            score = gumbel_noise(word) - depth
            if score > best or (score == best and token_id < best_id):
                best, best_id = score, token_id
    return best_id


@numba.njit(nogil=True, cache=True, error_model="numpy")
def draw_listed(ids, depths, last_depth, last_id, seed, output_index):  # type: ignore[no-untyped-def]
    """Return what `draw` does, of tokens listed by id with their depths; -1 if not few are kept."""
    kept = np.empty(len(ids), np.int32)
    num_kept = 0
    for i in range(len(ids)):  # without a branch, which would often be mispredicted
        kept[num_kept] = i
        is_last = (depths[i] == last_depth) & (ids[i] <= last_id)
        num_kept += (depths[i] < last_depth) | is_last
    if num_kept > _FEW:
        return -1
    words = np.empty((4, num_kept), np.uint32)
    for n in range(num_kept):
        words[0, n] = uint32(ids[kept[n]] // 4)
    philox_at(words, output_index, seed)
    best, best_id = -np.inf, -1
    for n in range(num_kept):
        token_id, depth = ids[kept[n]], depths[kept[n]]
        word = words[token_id & 3, n]
        if _cannot_win(word, best + depth):
            continue
        score = gumbel_noise(word) - depth
        if score > best:
            best, best_id = score, token_id
    return best_id
