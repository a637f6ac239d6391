"""Products of quantised weights whose inputs are divided into fixed ranges: candidates.

The order of sums is one for all of them: the inputs are RANGES ranges of equal length; a range's
groups of 128 are chains of the matrix unit, each times its scale, added in ascending order; the
ranges' sums are added in ascending order. Who computes a range does not enter the bits:

    together   one program's warps, by a batch of RANGES matrix products
    apart      RANGES programs; the last one that arrives adds up what all have stored
    in turn    one program, range after range, for many rows

A row's tile of 8 is the narrowest that a matrix instruction has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin, prefetch_rows
from engine.runner.gpu.kernels.products import _store_gated, _store_sum, tile_of
from engine.runner.gpu.kernels.stored_weights import row_elements

FP8: tl.constexpr = tl.constexpr(1)
GROUP_INPUTS: tl.constexpr = tl.constexpr(128)


@triton.jit
def _widened(stored, HAS_PTX: tl.constexpr):
    """Return e4m3 as bfloat16; in PTX by shifts: 0.EEEE.MMM << 4 is the number times 2**-120."""
    if HAS_PTX:
        numbers = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, zero, up;
            mov.b32 zero, 0x80008000; mov.b32 up, 0x7b807b80;
            prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4; shr.u32 d, b, 4;
            and.b32 c, c, 0x07f007f0; and.b32 d, d, 0x07f007f0;
            lop3.b32 a, a, 0x80008000, c, 0xea; lop3.b32 b, b, 0x80008000, d, 0xea;
            fma.rn.bf16x2 $0, a, up, zero; fma.rn.bf16x2 $1, b, up, zero;
            }""",
            "=&r,=&r,r",
            [stored],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        numbers = stored.to(tl.bfloat16)
    return numbers


@triton.jit
def _halves(stored, HAS_PTX: tl.constexpr):
    """Return the low and the high halves of bytes as bfloat16 numbers from -8 to 7.

    In PTX: 0x4300 | n is 128 + n, so a half lies in its place after one prmt and one lop3.
    """
    if HAS_PTX:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, minus;
            mov.b32 one, 0x3f803f80; mov.b32 minus, 0xc308c308;
            prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4; shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, a, one, minus; fma.rn.bf16x2 $1, b, one, minus;
            fma.rn.bf16x2 $2, c, one, minus; fma.rn.bf16x2 $3, d, one, minus;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [stored],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((stored & 15).to(tl.float32) - 8.0).to(tl.bfloat16)
        high = ((stored >> 4).to(tl.float32) - 8.0).to(tl.bfloat16)
    return low, high


@triton.jit
def _turned(rows, IS_BATCH: tl.constexpr):
    return tl.permute(rows, (0, 2, 1)) if IS_BATCH else tl.trans(rows)


@triton.jit
def _lanes(COUNT: tl.constexpr, IS_BATCH: tl.constexpr):
    """Return 0 .. COUNT - 1 along the last axis."""
    return tl.arange(0, COUNT)[None, None, :] if IS_BATCH else tl.arange(0, COUNT)[None, :]


@triton.jit
def _group(places, inputs, is_row, FORM: tl.constexpr, HAS_PTX: tl.constexpr,
           IS_BATCH: tl.constexpr):  # fmt: skip
    """Return the products [.., BN, BM] of one group's weights and inputs, from zero."""
    if FORM == FP8:
        k = _lanes(GROUP_INPUTS, IS_BATCH)
        rows = tl.load(inputs + k, mask=is_row, other=0.0)
        part = tl.dot(_widened(tl.load(places + k), HAS_PTX), _turned(rows, IS_BATCH))
    else:
        HALF: tl.constexpr = GROUP_INPUTS // 2
        k = _lanes(HALF, IS_BATCH)
        first = tl.load(inputs + k, mask=is_row, other=0.0)
        second = tl.load(inputs + HALF + k, mask=is_row, other=0.0)
        low, high = _halves(tl.load(places + k), HAS_PTX)
        part = tl.dot(low, _turned(first, IS_BATCH))
        part = tl.dot(high, _turned(second, IS_BATCH), part)
    return part


@triton.jit
def _scale_places(scales, sources, K: tl.constexpr, FORM: tl.constexpr):
    """Return where the first scale of each output lies."""
    if FORM == FP8:
        places = scales + sources // GROUP_INPUTS * (K // GROUP_INPUTS)
    else:
        places = scales + sources * (K // GROUP_INPUTS)
    return places


@triton.jit
def _sum_of_ranges(ranges, RANGES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Add up [RANGES, BN, BM] along the first axis, in ascending order."""
    pairs = tl.reshape(ranges, (2, RANGES // 2, BN, BM))
    first, second = tl.split(tl.permute(pairs, (1, 2, 3, 0)))
    if RANGES == 2:
        total = tl.reshape(first, (BN, BM))
    else:
        total = _sum_of_ranges(first, RANGES // 2, BN, BM)
    return _after(total, second, RANGES // 2, BN, BM)


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
def together(x, weights, scales, y, residual, num_rows, N: tl.constexpr, K: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, RANGES: tl.constexpr,
             UNROLLED: tl.constexpr, FORM: tl.constexpr, IS_GATED: tl.constexpr,
             HAS_RESIDUAL: tl.constexpr, PREFETCH: tl.constexpr, HAS_PTX: tl.constexpr,
             IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """One program's warps have a range each; N outputs, of gate and of up when IS_GATED."""
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * BN + tl.arange(0, BN)
    if PREFETCH > 0:
        prefetch_rows(weights, outputs, row_elements(K, FORM), PREFETCH)
        if IS_GATED:
            prefetch_rows(weights, outputs + N, row_elements(K, FORM), PREFETCH)
    begin(IS_PROGRAMMATIC)
    LENGTH: tl.constexpr = K // RANGES
    GROUPS: tl.constexpr = LENGTH // GROUP_INPUTS
    WIDTH: tl.constexpr = row_elements(GROUP_INPUTS, FORM)
    lanes = tl.arange(0, RANGES)
    places = weights + (outputs[None, :, None].to(tl.int64) * row_elements(K, FORM)
                        + lanes[:, None, None] * row_elements(LENGTH, FORM))  # fmt: skip
    inputs = x + rows[None, :, None].to(tl.int64) * K + lanes[:, None, None] * LENGTH
    is_row = (rows < num_rows)[None, :, None]
    at = _scale_places(scales, outputs[None, :], K, FORM) + lanes[:, None] * GROUPS
    total = tl.zeros((RANGES, BN, BM), tl.float32)
    scale = tl.load(at)
    if IS_GATED:
        above = tl.zeros((RANGES, BN, BM), tl.float32)
        at_up = _scale_places(scales, N + outputs[None, :], K, FORM) + lanes[:, None] * GROUPS
        scale_up = tl.load(at_up)
    for begin_of in range(0, GROUPS, UNROLLED):
        for part_of in tl.static_range(UNROLLED):
            group = begin_of + part_of
            coming = tl.minimum(group + 1, GROUPS - 1)
            next_scale = tl.load(at + coming)
            here, there = places + group * WIDTH, inputs + group * GROUP_INPUTS
            part = _group(here, there, is_row, FORM, HAS_PTX, True)
            total += part * scale.to(tl.float32)[:, :, None]
            scale = next_scale
            if IS_GATED:
                next_up = tl.load(at_up + coming)
                part = _group(here + N * row_elements(K, FORM), there, is_row, FORM, HAS_PTX, True)
                above += part * scale_up.to(tl.float32)[:, :, None]
                scale_up = next_up
    result = _sum_of_ranges(total, RANGES, BN, BM)
    if IS_GATED:
        second = _sum_of_ranges(above, RANGES, BN, BM)
        _store_gated(y, result, second, rows, outputs, num_rows, N, BN)
    else:
        _store_sum(y, residual, result, rows, outputs, num_rows, N, BN, HAS_RESIDUAL)


@triton.jit
def _one_range(weights, scales, x_rows, is_row, sources, number, K: tl.constexpr,
               BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, UNROLLED: tl.constexpr,
               FORM: tl.constexpr, HAS_PTX: tl.constexpr):  # fmt: skip
    """Return the sum [BN, BM] of one range."""
    LENGTH: tl.constexpr = K // RANGES
    GROUPS: tl.constexpr = LENGTH // GROUP_INPUTS
    WIDTH: tl.constexpr = row_elements(GROUP_INPUTS, FORM)
    first = number * GROUPS
    places = weights + sources[:, None].to(tl.int64) * row_elements(K, FORM) + first * WIDTH
    inputs = x_rows + number * LENGTH
    at = _scale_places(scales, sources, K, FORM) + first
    scale = tl.load(at)
    total = tl.zeros((BN, BM), tl.float32)
    for begin_of in range(0, GROUPS, UNROLLED):
        for part_of in tl.static_range(UNROLLED):
            group = begin_of + part_of
            next_scale = tl.load(at + tl.minimum(group + 1, GROUPS - 1))
            part = _group(places + group * WIDTH, inputs + group * GROUP_INPUTS, is_row, FORM,
                          HAS_PTX, False)  # fmt: skip
            total += part * scale.to(tl.float32)[:, None]
            scale = next_scale
    return total


@triton.jit
def in_turn(x, weights, scales, y, residual, num_rows, N: tl.constexpr, K: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, RANGES: tl.constexpr,
            UNROLLED: tl.constexpr, FORM: tl.constexpr, IS_GATED: tl.constexpr,
            HAS_RESIDUAL: tl.constexpr, HAS_PTX: tl.constexpr,
            IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """One program computes range after range."""
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * BN + tl.arange(0, BN)
    begin(IS_PROGRAMMATIC)
    x_rows = x + rows[:, None].to(tl.int64) * K
    is_row = (rows < num_rows)[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for number in range(RANGES):
        total += _one_range(
            weights, scales, x_rows, is_row, outputs, number, K, BM, BN, RANGES, UNROLLED, FORM,
            HAS_PTX,
        )  # fmt: skip
    if IS_GATED:
        above = tl.zeros((BN, BM), tl.float32)
        for number in range(RANGES):
            above += _one_range(
                weights, scales, x_rows, is_row, outputs + N, number, K, BM, BN, RANGES, UNROLLED,
                FORM, HAS_PTX,
            )  # fmt: skip
        _store_gated(y, total, above, rows, outputs, num_rows, N, BN)
    else:
        _store_sum(y, residual, total, rows, outputs, num_rows, N, BN, HAS_RESIDUAL)


@triton.jit
def _stored_ranges(partials, place, is_result, SIZE: tl.constexpr, BN: tl.constexpr,
                   BM: tl.constexpr, RANGES: tl.constexpr):  # fmt: skip
    """Return the sum [BN, BM] of what all ranges' programs have stored, in ascending order."""
    total = tl.zeros((BN, BM), tl.float32)
    for number in tl.static_range(RANGES):
        # Past the L1 cache, which other multiprocessors' stores do not reach.
        total += tl.load(partials + number * SIZE + place, mask=is_result, other=0.0,
                         cache_modifier=".cg")  # fmt: skip
    return total


@triton.jit
def apart(x, weights, scales, y, residual, partials, counters, num_rows, N: tl.constexpr,
          K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
          RANGES: tl.constexpr, UNROLLED: tl.constexpr, FORM: tl.constexpr, IS_GATED: tl.constexpr,
          HAS_RESIDUAL: tl.constexpr, PREFETCH: tl.constexpr, HAS_PTX: tl.constexpr,
          MOST_ROWS: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """RANGES programs for each tile, one a range; the last to arrive adds up `partials`.

    `partials` has room for [2 RANGES, MOST_ROWS, N]; `counters`, one a tile, are 0 before and
    after.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    number = tl.program_id(1)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * BN + tl.arange(0, BN)
    LENGTH: tl.constexpr = row_elements(K // RANGES, FORM)
    if PREFETCH > 0:
        ahead = weights + number * LENGTH
        prefetch_rows(ahead, outputs, row_elements(K, FORM), PREFETCH)
        if IS_GATED:
            prefetch_rows(ahead, outputs + N, row_elements(K, FORM), PREFETCH)
    begin(IS_PROGRAMMATIC)
    x_rows = x + rows[:, None].to(tl.int64) * K
    is_row = (rows < num_rows)[:, None]
    SIZE: tl.constexpr = MOST_ROWS * N
    place = rows[None, :] * N + outputs[:, None]
    is_result = (rows < num_rows)[None, :]
    total = _one_range(
        weights, scales, x_rows, is_row, outputs, number, K, BM, BN, RANGES, UNROLLED, FORM,
        HAS_PTX,
    )  # fmt: skip
    tl.store(partials + number * SIZE + place, total, mask=is_result)
    if IS_GATED:
        above = _one_range(
            weights, scales, x_rows, is_row, outputs + N, number, K, BM, BN, RANGES, UNROLLED,
            FORM, HAS_PTX,
        )  # fmt: skip
        tl.store(partials + (RANGES + number) * SIZE + place, above, mask=is_result)
    tl.debug_barrier()
    counter = counters + tl.program_id(0)
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if arrived == RANGES - 1:
        tl.store(counter, 0)
        total = _stored_ranges(partials, place, is_result, SIZE, BN, BM, RANGES)
        if IS_GATED:
            above = _stored_ranges(partials + RANGES * SIZE, place, is_result, SIZE, BN, BM, RANGES)
            _store_gated(y, total, above, rows, outputs, num_rows, N, BN)
        else:
            _store_sum(y, residual, total, rows, outputs, num_rows, N, BN, HAS_RESIDUAL)
