"""Kernels over one row of logits: filters and the likeliest tokens.

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

# The filters sort tokens into buckets of 1/64 nat and then scan a single bucket. Tokens deeper than
# 64 nats (a weight below 1e-27) share the last one.
_BUCKETS_PER_NAT = 64.0
_NUM_BUCKETS = 4096


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
    the kept ones in `depths`. The id is -1 if the prefix ends after the tokens in `depths`.
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
