"""The draw on the card: the next token of each sequence, and the state of the next step.

Gumbel's maximum: a row's token is the one with the largest `logit / temperature - log(-log(u))`,
in float64, ties to the lowest id. The uniform numbers are Philox4x32-10 (Salmon et al., 2011) with
the request's seed as key and (token // 4, index of the draw) as counter, word token % 4: the words
of the CPU's `kernels/philox.py`. A temperature of 0 adds no noise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin

UNIT: tl.constexpr = tl.constexpr(2.3283064365386963e-10)
"""1 / 2^32."""


@triton.jit
def philox_words(block, index, seed):
    """Return four uint32 words of the counter (block, index) under a 64-bit seed."""
    zero = tl.zeros_like(block)
    key_low = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = block, zero + index, zero, zero
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(a, 0xD2511F53), a * 0xD2511F53
        high_c, low_c = tl.umulhi(c, 0xCD9E8D57), c * 0xCD9E8D57
        a, b, c, d = high_c ^ b ^ key_low, low_c, high_a ^ d ^ key_high, low_a
        key_low += 0x9E3779B9
        key_high += 0xBB67AE85
    return a, b, c, d


@triton.jit
def _estimates(logits, words, temperature):
    """Return float32 scores whose error is below half of `_margin`.

    A uniform number close to 1 is known by its distance to 1, which float32 holds exactly enough.
    """
    near_zero = (words.to(tl.float32) + 0.5) * UNIT
    to_one = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * UNIT
    series = to_one * (1.0 + to_one * (0.5 + to_one * (0.33333334 + to_one * 0.25)))
    exact_log = tl.where(words < 0x80000000, -tl.log(near_zero), -tl.log(1.0 - to_one))
    return logits / temperature - tl.log(tl.where(to_one < 0.015625, series, exact_log))


@triton.jit
def _margin(logits, temperature):
    """Return how far an estimate may lie below the best one and still belong to the best token."""
    largest = tl.max(tl.where(tl.abs(logits) < 1.0e30, tl.abs(logits), 0.0), 0)
    return 1.0e-4 + 2.0e-6 * largest / temperature


@triton.jit
def gumbel_noise(token, index, seed):
    """Return the float64 noise of one token, or of many."""
    a, b, c, d = philox_words((token // 4).to(tl.uint32), index, seed)
    place = token % 4
    word = tl.where(place == 0, a, tl.where(place == 1, b, tl.where(place == 2, c, d)))
    uniform = (word.to(tl.float64) + 0.5) * UNIT
    return -tl.log(-tl.log(uniform))


@triton.jit
def _score(logit, token, index, seed, temperature):
    """Return the float64 score of one token."""
    scaled = logit.to(tl.float64) / temperature.to(tl.float64)
    return scaled + gumbel_noise(token, index, seed)


@triton.jit
def draw_slices(logits, temperatures, seeds, indices, best_scores, best_tokens, slices,
                VOCABULARY: tl.constexpr, SLICE: tl.constexpr,
                IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Find the best token of each slice of each row. Program: (row, slice).

    Float32 estimates leave out all tokens that cannot be the best one; the few that are left, most
    often one, are scored in float64. A slice with NaN or infinity has the token -1, and is the best
    one; a token with -infinity is withheld.
    """
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * SLICE + tl.arange(0, SLICE)
    is_token = token < VOCABULARY
    own = logits + row * VOCABULARY
    logit = tl.load(own + token, mask=is_token, other=-float("inf"))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        index = tl.load(indices + row).to(tl.uint32)
        seed = tl.load(seeds + row)
        block = (part * (SLICE // 4) + tl.arange(0, SLICE // 4)).to(tl.uint32)
        a, b, c, d = philox_words(block, index, seed)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (SLICE,))
        estimate = _estimates(logit, words, temperature)
        lowest = tl.max(estimate, 0) - _margin(logit, temperature)
        is_left = is_token & (estimate >= lowest) & (logit > -1.0e30)
        num_left = tl.sum(is_left.to(tl.int32), 0)
        best = tl.full((), -float("inf"), tl.float64)
        found = part * SLICE
        while num_left > 0:
            candidate = tl.min(tl.where(is_left, token, VOCABULARY), 0)
            score = _score(tl.load(own + candidate), candidate, index, seed, temperature)
            found = tl.where(score > best, candidate, found)
            best = tl.maximum(best, score)
            is_left = is_left & (token != candidate)
            num_left -= 1
    else:
        largest, place = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
        best = largest.to(tl.float64)
        found = part * SLICE + place
    is_bad = tl.max((is_token & ~(logit < float("inf"))).to(tl.int32), 0) > 0
    tl.store(best_scores + row * slices + part, tl.where(is_bad, float("inf"), best))
    tl.store(best_tokens + row * slices + part, tl.where(is_bad, -1, found))


@triton.jit
def choose(
    best_scores, best_tokens, slices, tokens, PARTS: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr
):
    """Choose each row's token among those of its slices. Program: row."""
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    tl.store(
        tokens + row, _best(best_scores + row * slices, best_tokens + row * slices, slices, PARTS)
    )


@triton.jit
def _best(scores, tokens, slices, PARTS: tl.constexpr):
    """Return the token of the best slice of a row, the first of equal ones."""
    part = tl.arange(0, PARTS)
    found = tl.load(scores + part, mask=part < slices, other=-float("inf"))
    _, place = tl.max(found, 0, return_indices=True, return_indices_tie_break_left=True)
    return tl.load(tokens + place)
