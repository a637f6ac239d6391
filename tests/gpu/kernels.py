"""Kernels that only measure: a pure read, and products whose K is divided among programs."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin
from engine.runner.gpu.kernels.products import store_gated


@triton.jit
def read(source, out, COUNT: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    total = tl.zeros((SIZE,), tl.float32)
    lanes = tl.arange(0, SIZE)
    for place in range(tl.program_id(0), COUNT // SIZE, PROGRAMS):
        total += tl.load(source + lanes + place.to(tl.int64) * SIZE)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def split_product(x, weights, y, num_rows, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
                   IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Partial sums y[part, M, N] over a PARTS-th of K each; the next kernel would add them."""
    begin(IS_PROGRAMMATIC)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    k = part * (K // PARTS) + tl.arange(0, BK)
    is_row = (rows < num_rows)[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K // PARTS, BK):
        inputs = tl.load(x + rows[:, None] * K + start + k[None, :], mask=is_row, other=0.0)
        stored = tl.load(weights + outputs[:, None].to(tl.int64) * K + start + k[None, :])
        total = tl.dot(stored, tl.trans(inputs), total)
    place = (part * num_rows + rows[:, None]).to(tl.int64) * N + outputs[None, :]
    tl.store(y + place, tl.trans(total), mask=is_row)


@triton.jit
def gate_up_thirds(x, weights, y, num_rows, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
                   BK: tl.constexpr, IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """silu(gate) * up of 96 outputs a program, for weights in stripes of 32 gate and 32 up rows.

    12,288 outputs are 128 programs, one on each multiprocessor, where tiles of 64 are 192.
    """
    begin(IS_PROGRAMMATIC)
    tile_m, tile_n = (
        tl.program_id(0) % tl.cdiv(num_rows, BM),
        tl.program_id(0) // tl.cdiv(num_rows, BM),
    )
    first = tl.zeros((64, BM), tl.float32)
    second = tl.zeros((64, BM), tl.float32)
    third = tl.zeros((64, BM), tl.float32)
    for start in range(0, K, BK):
        inputs = tl.trans(x.load([tile_m * BM, start]))
        first = tl.dot(weights.load([tile_n * 192, start]), inputs, first)
        second = tl.dot(weights.load([tile_n * 192 + 64, start]), inputs, second)
        third = tl.dot(weights.load([tile_n * 192 + 128, start]), inputs, third)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * 96 + tl.arange(0, 32)
    _store_stripe(y, first, rows, outputs, num_rows, N, BM)
    _store_stripe(y, second, rows, outputs + 32, num_rows, N, BM)
    _store_stripe(y, third, rows, outputs + 64, num_rows, N, BM)


@triton.jit
def _store_stripe(y, sums, rows, outputs, num_rows, N: tl.constexpr, BM: tl.constexpr):
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, 32, BM)), (1, 2, 0)))
    store_gated(y, gate, up, rows, outputs, num_rows, N, 32)
