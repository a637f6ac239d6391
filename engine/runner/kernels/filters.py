"""Kernels over one row of logits: filters, the draw, the likeliest tokens.

All kernels see a row as *depths*: depth[v] = (largest logit - logit[v]) / temperature, so 0 is the
likeliest token and a token's weight is exp(-depth). Tokens are ranked by (depth, id): among equal
logits the lowest id comes first. Each filter keeps a prefix of that ranking, so the tokens that all
of them keep are described by one pair, the depth and the id of the last token kept.

A row is always scanned by one thread in one order, so its result is a function of the row alone.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numba import uint32

from engine.runner.kernels.philox import philox_blocks

# The filters sort tokens into buckets of 1/64 nat and then scan a single bucket. Tokens deeper than
# 64 nats (a weight below 1e-27) share the last one.
_BUCKETS_PER_NAT = 64.0
_NUM_BUCKETS = 4096

# Noise is computed for a stripe of this many tokens together, or not at all.
_STRIPE = 256

# The largest possible noise: the largest word gives -log(-log(1 - 2**-33)) = 22.87.
_MAX_NOISE = 23.0
_WORD = 2.0**-32
_LOWEST = -1e300
# _RACE_BOUND[n + 1] >= exp(-t) for every t >= n >= 0, including rounding of the draw's logarithms.
# The first entry, for t < 0, passes every word; the last one passes none.
_RACE_BOUND = np.exp(-np.arange(-1.0, _MAX_NOISE + 1.0)) * (1.0 + 1e-9)


@numba.njit("int64(float32)", nogil=True, cache=True)
def _bucket(depth: float) -> int:
    scaled = depth * _BUCKETS_PER_NAT
    return int(scaled) if scaled < _NUM_BUCKETS - 1 else _NUM_BUCKETS - 1


@numba.njit("boolean(float32, int64, float64, int64)", nogil=True, cache=True)
def _is_kept(depth: float, token_id: int, last_depth: float, last_id: int) -> bool:
    return depth < last_depth or (depth == last_depth and token_id <= last_id)


@numba.njit("int64[::1](float32[::1], int64, float64, int64)", nogil=True, cache=True)
def _ranked_bucket(depths: np.ndarray, bucket: int, last_depth: float, last_id: int) -> np.ndarray:
    """Return the kept tokens of one bucket, by rank."""
    # Scaling by a power of two is exact, so these bounds equal those of _bucket and are faster.
    start = np.float32(bucket / _BUCKETS_PER_NAT)
    end = np.float32((bucket + 1) / _BUCKETS_PER_NAT if bucket < _NUM_BUCKETS - 1 else np.inf)
    most = 0
    for depth in depths:
        most += (depth >= start) & (depth <= end)
    members = np.empty(most, np.int64)
    num = 0
    for token_id in range(len(depths)):
        depth = depths[token_id]
        if start <= depth <= end and (
            _bucket(depth) == bucket and _is_kept(depth, token_id, last_depth, last_id)
        ):
            members[num] = token_id
            num += 1
    members = members[:num]
    # Members are in order of id and the sort is stable, so equal depths stay in that order.
    return members[np.argsort(depths[members], kind="mergesort")]


@numba.njit("Tuple((float64, int64))(float32[::1], int64)", nogil=True, cache=True)
def top_k_end(depths: np.ndarray, top_k: int) -> tuple[float, int]:
    """Return the end (depth, id) of the first `top_k` ranks; the row has at least so many."""
    counts = np.zeros(_NUM_BUCKETS, np.int64)
    for token_id in range(len(depths)):
        counts[_bucket(depths[token_id])] += 1
    bucket, num_above = 0, 0
    while num_above + counts[bucket] < top_k:
        num_above += counts[bucket]
        bucket += 1
    members = _ranked_bucket(depths, bucket, np.inf, len(depths))
    last = members[top_k - num_above - 1]
    return depths[last], last


@numba.njit(
    "Tuple((float64, int64))(float32[::1], float32[::1], float64, float64, float64, int64)",
    nogil=True,
    cache=True,
)
def top_p_end(
    depths: np.ndarray,
    weights: np.ndarray,
    top_p: float,
    total: float,
    last_depth: float,
    last_id: int,
) -> tuple[float, int]:
    """Return the end of the smallest prefix with at least `top_p` of the weight.

    `total` is the weight of all tokens, some of which may be missing in `depths`; below 0: that of
    the kept ones in `depths`. The id is -1 if the prefix ends behind the tokens in `depths`.
    """
    masses = np.zeros(_NUM_BUCKETS, np.float64)
    keeps_all = last_depth == np.inf and last_id >= len(depths)
    for token_id in range(len(depths)):
        if keeps_all or _is_kept(depths[token_id], token_id, last_depth, last_id):
            masses[_bucket(depths[token_id])] += weights[token_id]
    if total < 0.0:
        total = 0.0
        for mass in masses:
            total += mass
    wanted = top_p * total
    bucket, reached = 0, 0.0
    while reached + masses[bucket] < wanted:
        reached += masses[bucket]
        bucket += 1
        if bucket == _NUM_BUCKETS:
            return last_depth, -1
    members = _ranked_bucket(depths, bucket, last_depth, last_id)
    last = members[-1]  # if rounding makes the members' sum smaller than their bucket's
    for token_id in members:
        reached += weights[token_id]
        if reached >= wanted:
            last = token_id
            break
    return depths[last], last


@numba.njit(
    "Tuple((float64, int64))(float32[::1], float32[::1], float64, int64, float64, float64)",
    nogil=True,
    cache=True,
)
def kept_prefix(
    depths: np.ndarray,
    weights: np.ndarray,
    total: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[float, int]:
    """Return (depth, id) of the last rank that top-k, then top-p, then min-p keep.

    At least one token is kept. `weights` is exp(-depths) and `total` their sum; both are read only
    if `top_p` is below 1.
    `top_k` 0, `top_p` 1 and `min_p` 0 each keep everything.
    """
    last_depth, last_id = np.inf, len(depths)
    if 0 < top_k < len(depths):
        last_depth, last_id = top_k_end(depths, top_k)
        total = -1.0
    if top_p < 1.0:
        last_depth, end = top_p_end(depths, weights, top_p, total, last_depth, last_id)
        # Only rounding of a `top_p` next to 1 can ask for more than there is.
        last_id = end if end >= 0 else len(depths)
    if min_p > 0.0:
        # weight >= min_p * largest weight, and the largest weight is 1
        deepest = -math.log(min_p)
        if last_depth > deepest:
            last_depth, last_id = deepest, len(depths)
    return last_depth, last_id


@numba.njit("float64(uint32)", nogil=True, cache=True)
def gumbel_noise(word: int) -> float:
    """Return standard Gumbel noise of one random word: -log(-log(u)), u = (word + 1/2) / 2**32."""
    return -math.log(-math.log((word + 0.5) * _WORD))


@numba.njit("boolean(uint32, float64)", nogil=True, cache=True)
def cannot_win(word: int, lead: float) -> bool:
    """Return whether the noise of `word` is certainly no larger than `lead`, without a logarithm.

    Noise must exceed t, that is -log(u) < exp(-t), and -log(u) is at least 1 - u.
    """
    needed = min(max(lead, -1.0), _MAX_NOISE)
    return 1.0 - (word + 0.5) * _WORD > _RACE_BOUND[int(needed + 1.0)]


@numba.njit("int64(float32[::1])", nogil=True, cache=True)
def _stripe_of_likeliest(depths: np.ndarray) -> int:
    """Return the start of the stripe with the first depth of 0; there is one."""
    stripes = depths[: len(depths) // _STRIPE * _STRIPE].view(np.int32).reshape((-1, _STRIPE))
    for number in range(len(stripes)):
        num_found = np.int32(0)
        for i in range(_STRIPE):
            num_found += np.int32(stripes[number, i] == 0)
        if num_found:
            return number * _STRIPE
    return len(stripes) * _STRIPE if len(depths) % _STRIPE else 0


@numba.njit("int64(float32[::1], float64, int64, uint64, uint32)", nogil=True, cache=True)
def draw(depths: np.ndarray, last_depth: float, last_id: int, seed: int, output_index: int) -> int:
    """Return the kept token with the largest `noise - depth`, the lowest id among equals.

    This is the Gumbel-max draw: token v is drawn with probability exp(-depth[v]) over the sum of
    the kept. The noise of vocabulary entry v at output index i of a request with seed s is that of
    word `v % 4` of the Philox block with key s and counter (v // 4, i, 0, 0). Seeded clients rely
    on this: changing it changes their answers.

    Most tokens, and most stripes of tokens, cannot win and are skipped, which changes no result.
    The stripe of a likeliest token is first: behind it, more can be skipped.
    """
    # Finite, so that an infinite depth never wins. The difference would be NaN, which passes every
    # comparison with the bound.
    best, best_id = _LOWEST, len(depths)
    # Depths are not negative, so their bits have the same order: a minimum of integers uses
    # vectors. One loop without slices or calls: those would take longer than a stripe.
    bits = depths.view(np.int32)
    stripes = bits[: len(bits) // _STRIPE * _STRIPE].reshape((-1, _STRIPE))
    found = np.empty(1, np.int32)
    words = np.empty((4, _STRIPE // 4), np.uint32)
    first = _stripe_of_likeliest(depths)
    for number in range(-1, -(-len(depths) // _STRIPE)):
        start = first if number < 0 else number * _STRIPE
        if number >= 0 and start == first:
            continue
        end = min(start + _STRIPE, len(depths))
        lowest = bits[start]
        if end - start == _STRIPE:
            for i in range(_STRIPE):
                lowest = min(lowest, stripes[start // _STRIPE, i])
        else:
            for i in range(start, end):
                lowest = min(lowest, bits[i])
        found[0] = lowest
        shallowest = found.view(np.float32)[0]
        if shallowest > last_depth or best + shallowest >= _MAX_NOISE:
            continue
        philox_blocks(words, uint32(start // 4), output_index, seed)
        # Nearly all tokens end at a comparison of integers, which is a little too weak.
        lead = min(max(best + shallowest, -1.0), _MAX_NOISE)
        least_word = uint32(max(0.0, (1.0 - _RACE_BOUND[int(lead + 1.0)]) / _WORD - 2.0))
        num_open = 0
        for row in range(4):
            for column in range(_STRIPE // 4):
                num_open += words[row, column] >= least_word
        if num_open == 0:
            continue
        for token_id in range(start, end):
            at = token_id - start
            word = words[at & 3, at >> 2]
            if word < least_word:
                continue
            depth = depths[token_id]
            if cannot_win(word, best + depth):
                continue
            if not _is_kept(depth, token_id, last_depth, last_id):
                continue
            score = gumbel_noise(word) - depth
            if score > best or (score == best and token_id < best_id):
                best, best_id = score, token_id
    return best_id


@numba.njit("int64[::1](float32[::1], int64)", nogil=True, cache=True)
def likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the `count` largest logits, best first, then by lowest id."""
    best = np.empty(count, np.int64)
    if count == 0:
        return best
    num = 0
    for token_id in range(len(logits)):
        if num == count and logits[token_id] <= logits[best[count - 1]]:
            continue
        at = num if num < count else count - 1
        while at > 0 and logits[best[at - 1]] < logits[token_id]:
            best[at] = best[at - 1]
            at -= 1
        best[at] = token_id
        num = min(num + 1, count)
    return best
