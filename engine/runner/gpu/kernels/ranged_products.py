"""Products of quantised weights and rows: `W @ x.T`, with the inputs in ranges of fixed length.

A group of inputs is a chain of matrix instructions, and the next group waits for its weights'
conversion. RANGES chains beside each other keep a multiprocessor busy, and the number of ranges
depends on the weights' shape alone. A range's groups are added in ascending order, each times its
scale; then the ranges' sums are added in ascending order. The bits do not depend on the warps that
compute a range:

    together   one program's warps, by a batch of RANGES matrix products, for few rows
    in turn    one program, range after range, for many

A range is a number of whole strips, and the last one has what is left: fewer strips, or a strip
that is not whole. What is not there is multiplied as 0, which changes no sum.

A row's tile of 8 is the narrowest that a matrix instruction has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin, prefetch_rows
from engine.runner.gpu.kernels.products import (
    sources_of,
    store_gated,
    store_sum,
    tile_of,
    with_bias,
)
from engine.runner.gpu.kernels.stored_weights import (
    STRIP_INPUTS,
    add_strip,
    num_strips,
    row_words,
    scale_places,
)


@triton.jit
def _sum_of_ranges(ranges, RANGES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Add up [RANGES, BN, BM] along the first axis, in ascending order."""
    if RANGES == 1:
        total = tl.reshape(ranges, (BN, BM))
    else:
        pairs = tl.reshape(ranges, (2, RANGES // 2, BN, BM))
        first, second = tl.split(tl.permute(pairs, (1, 2, 3, 0)))
        total = _sum_of_ranges(first, RANGES // 2, BN, BM)
        total = _after(total, second, RANGES // 2, BN, BM)
    return total


@triton.jit
def _after(total, ranges, RANGES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Add to `total` the ranges [RANGES, BN, BM] in ascending order."""
    if RANGES == 1:
        total += tl.reshape(ranges, (BN, BM))
    else:
        pairs = tl.reshape(ranges, (2, RANGES // 2, BN, BM))
        first, second = tl.split(tl.permute(pairs, (1, 2, 3, 0)))
        total = _after(total, first, RANGES // 2, BN, BM)
        total = _after(total, second, RANGES // 2, BN, BM)
    return total


@triton.jit
def together(x_rows, weights, scales, is_row, sources, N: tl.constexpr, K: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, UNROLLED: tl.constexpr,
             FORM: tl.constexpr, IS_GATED: tl.constexpr, HAS_PTX: tl.constexpr):  # fmt: skip
    """Return the sums [BN, BM] of rows of weights, and of those N rows further when IS_GATED.

    `x_rows` and `is_row` are [1, BM, 1].
    """
    WORDS: tl.constexpr = row_words(K, FORM)
    WIDTH: tl.constexpr = row_words(STRIP_INPUTS, FORM)
    STRIPS: tl.constexpr = (num_strips(K) + RANGES - 1) // RANGES
    IS_WHOLE: tl.constexpr = STRIPS * RANGES * STRIP_INPUTS == K
    lanes = tl.arange(0, RANGES)
    places = (weights + sources[None, :, None].to(tl.int64) * WORDS
              + lanes[:, None, None] * (STRIPS * WIDTH))  # fmt: skip
    inputs = x_rows + lanes[:, None, None] * (STRIPS * STRIP_INPUTS)
    at = scale_places(scales, sources[None, :], K, FORM) + lanes[:, None] * STRIPS
    total = tl.zeros((RANGES, BN, BM), tl.float32)
    scale = tl.load(at)
    if IS_GATED:
        above = tl.zeros((RANGES, BN, BM), tl.float32)
        at_up = scale_places(scales, N + sources[None, :], K, FORM) + lanes[:, None] * STRIPS
        scale_up = tl.load(at_up)
    for begin_of in range(0, STRIPS, UNROLLED):
        for part_of in tl.static_range(UNROLLED):
            strip = begin_of + part_of
            coming = tl.minimum(strip + 1, STRIPS - 1)
            here, there = places + strip * WIDTH, inputs + strip * STRIP_INPUTS
            left = None
            if not IS_WHOLE:
                # The last strip stands for those that are not there.
                before = lanes * STRIPS
                coming = tl.minimum(coming, num_strips(K) - 1 - before)[:, None]
                at_strip = tl.minimum(strip, num_strips(K) - 1 - before)[:, None, None]
                here = places + at_strip * WIDTH
                left = (K - (before + strip) * STRIP_INPUTS)[:, None, None]
            next_scale = tl.load(at + coming)
            total = add_strip(total, here, there, is_row, scale, left, FORM, HAS_PTX, True)
            scale = next_scale
            if IS_GATED:
                next_up = tl.load(at_up + coming)
                above = add_strip(
                    above, here + N * WORDS, there, is_row, scale_up, left, FORM, HAS_PTX, True
                )
                scale_up = next_up
    result = _sum_of_ranges(total, RANGES, BN, BM)
    second = _sum_of_ranges(above, RANGES, BN, BM) if IS_GATED else result
    return result, second


@triton.jit
def ranges_together(x, weights, scales, y, residual, bias, num_rows, N: tl.constexpr,
                    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
                    RANGES: tl.constexpr, UNROLLED: tl.constexpr, FORM: tl.constexpr,
                    IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                    PREFETCH: tl.constexpr, HAS_PTX: tl.constexpr,
                    IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute a tile, a range to each warp or two; N outputs, of gate and of up when IS_GATED."""
    WIDTH: tl.constexpr = row_words(STRIP_INPUTS, FORM)
    STRIPS: tl.constexpr = (num_strips(K) + RANGES - 1) // RANGES
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * BN + tl.arange(0, BN)
    sources = sources_of(outputs, N, BN)
    lanes = tl.arange(0, RANGES)
    if PREFETCH > 0:
        first_strips = sources[:, None] * num_strips(K) + lanes[None, :] * STRIPS
        begins = tl.reshape(first_strips, (BN * RANGES,))
        prefetch_rows(weights, begins, WIDTH, PREFETCH)
        if IS_GATED:
            prefetch_rows(weights, begins + N * num_strips(K), WIDTH, PREFETCH)
    begin(IS_PROGRAMMATIC)
    x_rows = x + rows[None, :, None].to(tl.int64) * K
    result, second = together(
        x_rows, weights, scales, (rows < num_rows)[None, :, None], sources, N, K, BM, BN, RANGES,
        UNROLLED, FORM, IS_GATED, HAS_PTX,
    )  # fmt: skip
    if IS_GATED:
        store_gated(y, result, second, rows, rows < num_rows, outputs, N, BN, IS_GELU)
    else:
        result = with_bias(result, bias, sources)
        store_sum(y, residual, result, rows, rows < num_rows, outputs, N, BN, HAS_RESIDUAL)


@triton.jit
def in_turn(x_rows, weights, scales, is_row, sources, K: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, RANGES: tl.constexpr, UNROLLED: tl.constexpr, FORM: tl.constexpr,
            HAS_PTX: tl.constexpr):  # fmt: skip
    """Return the sums [BN, BM] of rows of weights; `x_rows` and `is_row` are [BM, 1]."""
    WIDTH: tl.constexpr = row_words(STRIP_INPUTS, FORM)
    STRIPS: tl.constexpr = (num_strips(K) + RANGES - 1) // RANGES
    IS_WHOLE: tl.constexpr = STRIPS * RANGES * STRIP_INPUTS == K
    places = weights + sources[:, None].to(tl.int64) * row_words(K, FORM)
    at = scale_places(scales, sources, K, FORM)
    total = tl.zeros((BN, BM), tl.float32)
    for number in range(RANGES):
        first = number * STRIPS
        scale = tl.load(at + first)
        ranged = tl.zeros((BN, BM), tl.float32)
        count = STRIPS
        if not IS_WHOLE:
            count = tl.minimum(STRIPS, num_strips(K) - first)
        for begin_of in range(0, count, UNROLLED):
            for part_of in tl.static_range(UNROLLED):
                strip = begin_of + part_of
                next_scale = tl.load(at + first + tl.minimum(strip + 1, count - 1))
                left = None
                if not IS_WHOLE:
                    left = K - (first + strip) * STRIP_INPUTS
                ranged = add_strip(
                    ranged, places + (first + strip) * WIDTH,
                    x_rows + (first + strip) * STRIP_INPUTS, is_row, scale, left, FORM, HAS_PTX,
                    False,
                )  # fmt: skip
                scale = next_scale
        total += ranged
    return total


@triton.jit
def ranges_in_turn(x, weights, scales, y, residual, bias, num_rows, N: tl.constexpr,
                   K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
                   RANGES: tl.constexpr, UNROLLED: tl.constexpr, FORM: tl.constexpr,
                   IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                   PREFETCH: tl.constexpr, HAS_PTX: tl.constexpr,
                   IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute a tile range after range, of the gate and then of up when IS_GATED."""
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * BN + tl.arange(0, BN)
    sources = sources_of(outputs, N, BN)
    if PREFETCH > 0:
        prefetch_rows(weights, sources, row_words(K, FORM), PREFETCH)
    begin(IS_PROGRAMMATIC)
    x_rows = x + rows[:, None].to(tl.int64) * K
    is_row = (rows < num_rows)[:, None]
    total = in_turn(
        x_rows, weights, scales, is_row, sources, K, BM, BN, RANGES, UNROLLED, FORM, HAS_PTX
    )
    if IS_GATED:
        above = in_turn(
            x_rows, weights, scales, is_row, sources + N, K, BM, BN, RANGES, UNROLLED, FORM, HAS_PTX
        )
        store_gated(y, total, above, rows, rows < num_rows, outputs, N, BN, IS_GELU)
    else:
        total = with_bias(total, bias, sources)
        store_sum(y, residual, total, rows, rows < num_rows, outputs, N, BN, HAS_RESIDUAL)
