"""Draws under top-k, top-p and min-p on the card: the token that the host's filters draw.

Depths, ranks and weights are the host's (`runner/kernels/sampling`): depth = (largest - logit) /
temperature in float32, ranks by (depth, token), weights e^-depth to the same bit. Before,
`draw.draw_slices` has found the largest logit of each slice of such a row, as of a greedy one.

    weigh        slice   how many tokens lie in each of 256 bins of depth, and their weight
    cut          row     the bin up to which every kept token lies
    list_kept    slice   the tokens up to there, as numbers that sort by rank
    draw_kept    row     those that the filters keep, in the order of ranks, and the draw

A bin is a float's exponent and four bits of its fraction, so bins are narrow where depths are
small, and 0.5 nats wide at 8. `cut` may be wrong about what is kept: `draw_kept` finds out. A row
is left to the host when its tokens do not fit into the list, or when the order in which weights are
added could decide what is kept: sums in other orders differ by less than `CLOSE`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.draw import gumbel_noise
from engine.runner.gpu.kernels.ordering import begin

BINS: tl.constexpr = tl.constexpr(256)
LIST: tl.constexpr = tl.constexpr(2048)
"""Most tokens of a row's list, which `draw_kept` sorts."""
FEW: tl.constexpr = tl.constexpr(128)
LEFT_TO_HOST: tl.constexpr = tl.constexpr(-2)
"""The token of a row that the host has to draw; -1 is that of a row with NaN or infinity."""
CLOSE: tl.constexpr = tl.constexpr(1e-10)
"""The sums of 2^18 weights in two orders differ by less than this share: 2 * 2^18 * 2^-53."""
_TIED: tl.constexpr = tl.constexpr(1e-12)
"""Scores that logarithms of two libraries can order differently differ by less."""
_SHIFT: tl.constexpr = tl.constexpr(19)
_FIRST: tl.constexpr = tl.constexpr((127 - 10) << 4)
"""The bin of 2^-10; depths below are in bin 0, and those from 2^6 on in the last one."""
_NO_KEY: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_SLICES_AT_A_TIME: tl.constexpr = tl.constexpr(16)
_TOO_MANY: tl.constexpr = tl.constexpr(-1)
_NOT_FINITE: tl.constexpr = tl.constexpr(-2)
_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: the sum has no fraction


@triton.jit
def exponential(x):
    """Return e^x for x <= 0, to the bit what `top_p_weights` of the CPU computes."""
    inside = tl.maximum(x, -103.97208404541015625)
    n = (inside * 1.4426950408889634 + _ROUNDER) - _ROUNDER
    r = tl.fma(n, tl.full(x.shape, -6.93145752e-1, tl.float32), inside)
    r = tl.fma(n, tl.full(x.shape, -1.42860677e-6, tl.float32), r)
    above = tl.full(x.shape, 5.082762527590693718096e-04, tl.float32)
    above = tl.fma(above, r, tl.full(x.shape, 6.757896990527504603057e-03, tl.float32))
    above = tl.fma(above, r, tl.full(x.shape, 5.114512081637298353406e-02, tl.float32))
    above = tl.fma(above, r, tl.full(x.shape, 2.473615434895520810817e-01, tl.float32))
    above = tl.fma(above, r, tl.full(x.shape, 7.257664613233124478488e-01, tl.float32))
    above = tl.fma(above, r, tl.full(x.shape, 9.999999999980870924916e-01, tl.float32))
    below = tl.full(x.shape, 2.159509375685829852307e-02, tl.float32)
    below = tl.fma(below, r, tl.full(x.shape, -2.742335390411667452936e-01, tl.float32))
    below = tl.fma(below, r, tl.full(x.shape, 1.0, tl.float32))
    exponent = n.to(tl.int32)
    first = tl.maximum(exponent, -126)
    value = tl.math.div_rn(above, below) * _power_of_two(exponent - first) * _power_of_two(first)
    return tl.where(x < -103.97208404541015625, 0.0, value)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _bin(depth):
    bits = depth.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits >> _SHIFT) - _FIRST, 0), BINS - 1)


@triton.jit
def _largest(best_scores, slices, PARTS: tl.constexpr):
    """Return a row's largest logit: infinity if one is NaN, -infinity if no token is left."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(best_scores + part, mask=part < slices, other=-float("inf")), 0)


@triton.jit
def _is_finite(value):
    return (value < float("inf")) & (value > -float("inf"))


@triton.jit
def _depth(logit, largest, temperature):
    return tl.math.div_rn(largest.to(tl.float32) - logit, tl.zeros_like(logit) + temperature)


@triton.jit
def weigh(logits, temperatures, best_scores, counts, weights, slices, VOCABULARY: tl.constexpr,
          SLICE: tl.constexpr, PARTS: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Count the tokens of a slice by bin, and add up their weights. Program: (row, slice)."""
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        largest = _largest(best_scores + row * slices, slices, PARTS)
        if _is_finite(largest):
            token = part * SLICE + tl.arange(0, SLICE)
            is_token = token < VOCABULARY
            logit = tl.load(logits + row * VOCABULARY + token, mask=is_token, other=-float("inf"))
            depth = _depth(logit, largest, temperature)
            weight = tl.sum(exponential(-depth).to(tl.float64), 0)
            found = tl.histogram(_bin(depth), BINS, mask=is_token)
            place = row * slices + part
            tl.store(counts + place * BINS + tl.arange(0, BINS), found)
            tl.store(weights + place, weight)


@triton.jit
def cut(temperatures, top_ks, top_ps, deepests, best_scores, counts, weights, slices, cuts,
        totals, listed, PARTS: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Find the last bin that is listed; it is below 0 where none is. Program: row."""
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperatures + row) > 0:
        largest = _largest(best_scores + row * slices, slices, PARTS)
        last = tl.where(largest == float("inf"), _NOT_FINITE, _TOO_MANY)
        if _is_finite(largest):
            part = tl.arange(0, PARTS)
            is_part = part < slices
            total = tl.sum(tl.load(weights + row * slices + part, mask=is_part, other=0.0), 0)
            tl.store(totals + row, total)
            number = tl.arange(0, BINS)
            count = tl.zeros((BINS,), tl.int32)
            for first in range(0, PARTS, _SLICES_AT_A_TIME):
                own = first + tl.arange(0, _SLICES_AT_A_TIME)
                places = (row * slices + own)[:, None] * BINS + number[None, :]
                count += tl.sum(tl.load(counts + places, mask=own[:, None] < slices, other=0), 0)
            below = tl.cumsum(count, 0)
            last = _last_bin(
                number, count, below, total, tl.load(top_ks + row), tl.load(top_ps + row),
                tl.load(deepests + row),
            )  # fmt: skip
            num_listed = tl.sum(tl.where(number == last, below, 0), 0)
            last = tl.where(num_listed <= LIST, last, _TOO_MANY)
        tl.store(cuts + row, last)
        tl.store(listed + row, 0)


@triton.jit
def _last_bin(number, count, below, total, top_k, top_p, deepest):
    """Return the bin up to which all kept tokens lie.

    Under top-p the weight of deeper tokens has a bound: each weighs at most as much as the first
    depth of its bin. Tokens of the last bin are never listed: noise is between -3.2 and 22.9, so
    the likeliest token has a higher score, and 2^18 of them weigh less than 1e-22 of it.
    """
    last = tl.full((), BINS - 1, tl.int32)
    if top_k > 0:
        last = tl.min(tl.where(below >= top_k, number, BINS - 1), 0)
    elif top_p < 1.0:
        start = ((number + _FIRST) << _SHIFT).to(tl.float32, bitcast=True)
        most = count * tl.exp(-tl.where(number > 0, start, 0.0)).to(tl.float64)
        deeper = tl.sum(most, 0) - tl.cumsum(most, 0)
        last = tl.min(tl.where(deeper <= (1.0 - top_p) * total * 0.999, number, BINS - 1), 0)
    # Under top-k and top-p, top-p's total is that of all k.
    if (top_k == 0) | (top_p >= 1.0):
        last = tl.minimum(last, _bin(deepest.to(tl.float32)))
    return tl.minimum(last, BINS - 2)


@triton.jit
def list_kept(logits, temperatures, best_scores, slices, cuts, listed, keys,
              VOCABULARY: tl.constexpr, SLICE: tl.constexpr, PARTS: tl.constexpr,
              IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """List the tokens of a slice up to the last bin, in any order. Program: (row, slice)."""
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        last = tl.load(cuts + row)
        largest = _largest(best_scores + row * slices, slices, PARTS)
        own = tl.load(best_scores + row * slices + part).to(tl.float32)
        if (last >= 0) & (_bin(_depth(own, largest, temperature)) <= last):
            token = part * SLICE + tl.arange(0, SLICE)
            is_token = token < VOCABULARY
            logit = tl.load(logits + row * VOCABULARY + token, mask=is_token, other=-float("inf"))
            depth = _depth(logit, largest, temperature)
            is_listed = is_token & (_bin(depth) <= last)
            taken = is_listed.to(tl.int32)
            start = tl.atomic_add(listed + row, tl.sum(taken, 0))
            key = (depth.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token
            place = start + tl.cumsum(taken, 0) - 1
            tl.store(keys + row * LIST + place, key, mask=is_listed)


@triton.jit
def draw_kept(temperatures, seeds, indices, top_ks, top_ps, deepests, cuts, totals, listed, keys,
              best_scores, best_tokens, slices, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Draw from a row's list; give the first slice the best score and the token. Program: row."""
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperatures + row) > 0:
        last = tl.load(cuts + row)
        token = tl.full((), LEFT_TO_HOST, tl.int32)
        if last >= 0:
            top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
            deepest, total = tl.load(deepests + row), tl.load(totals + row)
            index, seed = tl.load(indices + row).to(tl.uint32), tl.load(seeds + row)
            count = tl.load(listed + row)
            if count <= FEW:
                token = _drawn(
                    keys + row * LIST, count, last, top_k, top_p, deepest, total, index, seed, FEW
                )
            else:
                token = _drawn(
                    keys + row * LIST, count, last, top_k, top_p, deepest, total, index, seed, LIST
                )
        if last != _NOT_FINITE:
            tl.store(best_scores + row * slices, float("inf"))
            tl.store(best_tokens + row * slices, token)


@triton.jit
def _drawn(keys, count, last, top_k, top_p, deepest, total, index, seed, SIZE: tl.constexpr):
    """Return the token that is drawn from a list, or `LEFT_TO_HOST`."""
    rank = tl.arange(0, SIZE)
    key = tl.sort(tl.load(keys + rank, mask=rank < count, other=_NO_KEY))
    depth = (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    token = (key & 0xFFFFFFFF).to(tl.int32)
    is_kept = rank < count
    if top_k > 0:
        is_kept = rank < tl.minimum(top_k, count)
    is_close = tl.full((), 0, tl.int32)
    if top_p < 1.0:
        weight = tl.where(is_kept, exponential(-depth), 0.0).to(tl.float64)
        if top_k > 0:
            total = tl.sum(weight, 0)
        wanted = top_p * total
        reached = tl.cumsum(weight, 0)
        is_close = tl.max((is_kept & (tl.abs(reached - wanted) <= CLOSE * total)).to(tl.int32), 0)
        # Tokens deeper than the list are not kept if min-p's bound is within it.
        is_short = (tl.sum(weight, 0) < wanted) & (_bin(deepest.to(tl.float32)) > last)
        is_close |= is_short.to(tl.int32)
        is_kept = is_kept & ((rank == 0) | (reached - weight < wanted))
    is_kept = is_kept & (depth.to(tl.float64) <= deepest)
    score = gumbel_noise(token, index, seed) - depth.to(tl.float64)
    score = tl.where(is_kept, score, -float("inf"))
    best = tl.max(score, 0)
    is_close |= (tl.sum((score >= best - _TIED).to(tl.int32), 0) > 1).to(tl.int32)
    found = tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)
    return tl.where(is_close > 0, LEFT_TO_HOST, found)
