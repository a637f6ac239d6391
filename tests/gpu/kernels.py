"""Kernels for tests: a pure read, products whose K is divided, a function, and what is checked."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.filters import exponential
from engine.runner.gpu.kernels.ordering import begin


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
def exponentials_of(x, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, exponential(tl.load(x + place)))


@triton.jit
def store_nothing(out):
    tl.program_id(0)


@triton.jit
def store_lanes(out, count):
    """Store what 16 lanes have loaded, of which those from `count` on are off: the first 8."""
    lane = tl.arange(0, 16)
    tl.store(out + lane, tl.load(out + lane, mask=lane < count), mask=lane < 8)


@triton.jit
def behind_the_last(outputs, N: tl.constexpr, BN: tl.constexpr):
    """Take the place of `products.sources_of`, with rows that are not there."""
    return outputs + N
