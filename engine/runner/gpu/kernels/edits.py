"""Changes of a row's logits before its draw: biases, penalties, and tokens that are withheld.

In the order of `runner/drawing/sampler`, each in the host's arithmetic to the bit. A token of a row
is changed by one thread, so the order of programs decides nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin


@triton.jit
def add_listed(logits, starts, tokens, values, VOCABULARY: tl.constexpr, TILE: tl.constexpr,
               IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Add values to the logits of the tokens that are listed for a row. Program: row.

    Row r has the entries from `starts[r]` to `starts[r + 1]`; a token is there once, or always with
    -infinity.
    """
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), end, TILE):
        place = first + tl.arange(0, TILE)
        is_listed = place < end
        at = logits + row * VOCABULARY + tl.load(tokens + place, mask=is_listed, other=0)
        value = tl.load(at, mask=is_listed, other=0.0)
        tl.store(at, value + tl.load(values + place, mask=is_listed, other=0.0), mask=is_listed)


@triton.jit
def _counts(history, first, end, start, SLICE: tl.constexpr, TILE: tl.constexpr):
    """Return how often each token of a slice that begins with `start` is in a part of a history."""
    place = first + tl.arange(0, TILE)
    own = tl.load(history + place, mask=place < end, other=-1) - start
    is_own = (own >= 0) & (own < SLICE)
    return tl.histogram(tl.where(is_own, own, 0), SLICE, mask=is_own)


@triton.jit
def penalise(logits, starts, prompts, ends, histories, repetitions, frequencies, presences,
             VOCABULARY: tl.constexpr, SLICE: tl.constexpr, TILE: tl.constexpr,
             IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Apply repetition, frequency and presence penalties. Program: (row, slice).

    Row r's tokens are the first `ends[r]` from `starts[r]` on, the prompt's `prompts[r]` first; a
    start below 0 means no penalties. A logit that is not finite afterwards becomes NaN, which the
    draw tells of; those of tokens that a mask withholds stay as they are.
    """
    begin(IS_PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    history = tl.load(starts + row)
    if history >= 0:
        start = tl.program_id(1) * SLICE
        prompt, end = tl.load(prompts + row), tl.load(ends + row)
        in_prompt = tl.zeros((SLICE,), tl.int32)
        for first in range(0, prompt, TILE):
            in_prompt += _counts(histories + history, first, prompt, start, SLICE, TILE)
        in_output = tl.zeros((SLICE,), tl.int32)
        for first in range(prompt, end, TILE):
            in_output += _counts(histories + history, first, end, start, SLICE, TILE)
        token = start + tl.arange(0, SLICE)
        at = logits + row * VOCABULARY + token
        logit = tl.load(at, mask=token < VOCABULARY, other=0.0)
        is_changed = (token < VOCABULARY) & (in_prompt + in_output > 0) & (logit != -1.0e30)
        repetition = tl.load(repetitions + row)
        divided = tl.math.div_rn(logit, tl.zeros_like(logit) + repetition)
        value = tl.where(logit > 0, divided, logit * repetition)
        frequency, presence = tl.load(frequencies + row), tl.load(presences + row)
        less = (frequency * in_output.to(tl.float64) + presence).to(tl.float32)
        value = tl.where(in_output > 0, value - less, value)
        value = tl.where(tl.abs(value) < float("inf"), value, float("nan"))
        tl.store(at, value, mask=is_changed)
