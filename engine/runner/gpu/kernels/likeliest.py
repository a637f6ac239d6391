"""Inputs of log probabilities: a row's sum of weights, its likeliest tokens, the drawn one.

A row's record has `WORDS` words of 32 bits: the sum of e^(logit - largest) as a float64, the
largest logit, that of the drawn token, `TOPS` logits in the order of ranks, and their tokens. The
host takes the logarithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin

TOPS: tl.constexpr = tl.constexpr(20)
WORDS: tl.constexpr = tl.constexpr(44)
_LARGEST: tl.constexpr = tl.constexpr(2)
_DRAWN: tl.constexpr = tl.constexpr(3)
_LOGITS: tl.constexpr = tl.constexpr(4)
_TOKENS: tl.constexpr = tl.constexpr(24)


@triton.jit
def find_likeliest(logits, num_tops, best_scores, best_tokens, weights, slices, sums, values,
                   tokens, VOCABULARY: tl.constexpr, SLICE: tl.constexpr, PARTS: tl.constexpr,
                   IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Write a row's record up to its drawn token. Program: row.

    `num_tops` below 0: the row has no log probabilities. Each slice has its best logit, its token,
    and the sum of its weights; `sums`, `values` and `tokens` are views of the same records. The
    likeliest token is that of the best slice, whose next one then takes its place; of equal logits
    the lowest token comes first.
    """
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(num_tops + row)
    if num_top >= 0:
        part = tl.arange(0, PARTS)
        own = row * slices + part
        best = tl.load(best_scores + own, mask=part < slices, other=-float("inf")).to(tl.float32)
        token = tl.load(best_tokens + own, mask=part < slices, other=0)
        weight = tl.load(weights + own, mask=part < slices, other=0.0)
        tl.store(sums + row * (WORDS // 2), tl.sum(weight, 0))
        tl.store(values + row * WORDS + _LARGEST, tl.max(best, 0))
        for number in range(num_top):
            value, place = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
            found = tl.sum(tl.where(part == place, token, 0), 0)
            tl.store(values + row * WORDS + _LOGITS + number, value)
            tl.store(tokens + row * WORDS + _TOKENS + number, found)
            other = place * SLICE + tl.arange(0, SLICE)
            is_token = other < VOCABULARY
            logit = tl.load(logits + row * VOCABULARY + other, mask=is_token, other=-float("inf"))
            is_behind = (logit < value) | ((logit == value) & (other > found))
            logit = tl.where(is_behind, logit, -float("inf"))
            value, at = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
            best = tl.where(part == place, value, best)
            token = tl.where(part == place, place * SLICE + at, token)


@triton.jit
def take_drawn(logits, num_tops, drawn, values, VOCABULARY: tl.constexpr,
               IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Write the logit of a row's drawn token into its record. Program: row."""
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(drawn + row)
    if (tl.load(num_tops + row) >= 0) & (token >= 0):
        tl.store(values + row * WORDS + _DRAWN, tl.load(logits + row * VOCABULARY + token))
