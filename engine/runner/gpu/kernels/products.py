"""Products of weights and rows: `y = x @ W.T`, computed as `W @ x.T`.

With the weights on the matrix unit's long side, one instruction family serves every number of rows,
and a tile of 16 rows wastes nothing while few sequences decode. One program adds up the whole of K
for its tile, by one chain of matrix instructions: there are no partial sums, so nothing is added in
an order that depends on the tile. Products of quantised weights are in `ranged_products`.

Order of programs: tiles of rows vary fastest within GROUP of them, so that the rows of x that one
group reads stay in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin, prefetch_rows

GELU_LINEAR: tl.constexpr = tl.constexpr(-2.302208198144325)
"""-2 sqrt(2 / pi) log2(e)"""
GELU_CUBIC: tl.constexpr = tl.constexpr(-0.1029432395800235)
"""The same times 0.044715"""


@triton.jit
def tile_of(
    program, num_rows, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr
):
    """Return the program's tile of rows and tile of weights."""
    tiles_n: tl.constexpr = (N + BN - 1) // BN
    tiles_m = tl.cdiv(num_rows, BM)
    group = program // (GROUP * tiles_n)
    first = group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    inside = program % (GROUP * tiles_n)
    return first + inside % size, inside // size


@triton.jit
def sources_of(outputs, N: tl.constexpr, BN: tl.constexpr):
    """Return the rows of weights to read: those after the last are the last one again."""
    if N % BN != 0:
        return tl.minimum(outputs, N - 1)
    return outputs


@triton.jit
def _results(is_row, outputs, N: tl.constexpr, BN: tl.constexpr):
    """Return which results of a tile exist: the last tile of weights may overhang."""
    return is_row & (outputs < N)[None, :] if N % BN != 0 else is_row


@triton.jit
def with_bias(total, biases, sources):
    """Return the sums [BN, BM] of the outputs `sources` with their float32 biases, if any."""
    if biases is not None:
        total += tl.load(biases + sources)[:, None]
    return total


@triton.jit
def store_sum(y, residual, total, rows, is_row, outputs, N: tl.constexpr, BN: tl.constexpr,
              HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """Round the sums [BN, BM] to y's type, add the residual, and store those of rows."""
    is_result = _results(is_row[:, None], outputs, N, BN)
    result = tl.trans(total).to(y.dtype.element_ty)
    place = rows[:, None].to(tl.int64) * N + outputs[None, :]
    if HAS_RESIDUAL:
        before = tl.load(residual + place, mask=is_result, other=0.0).to(tl.float32)
        result = (before + result.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + place, result, mask=is_result)


@triton.jit
def _gelu_power(x):
    """Return e^-2u, where GELU by tanh is x (1 + tanh(u)) / 2 = x / (1 + e^-2u).

    u is sqrt(2 / pi) (x + 0.044715 x^3).
    """
    return tl.exp2(x * (GELU_LINEAR + GELU_CUBIC * x * x))


@triton.jit
def store_gated(y, gate, up, rows, is_row, outputs, N: tl.constexpr, BN: tl.constexpr,
                IS_GELU: tl.constexpr):  # fmt: skip
    """Store silu(gate) * up of sums [BN, BM], or gelu(gate) * up.

    Gate, up and the function of the gate are rounded to y's type. GELU is that by tanh.
    """
    kind = y.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    power = _gelu_power(gate) if IS_GELU else tl.exp(-gate)
    activated = (gate / (1.0 + power)).to(kind).to(tl.float32)
    result = (activated * up.to(kind).to(tl.float32)).to(kind)
    is_result = _results(is_row[:, None], outputs, N, BN)
    place = rows[:, None].to(tl.int64) * N + outputs[None, :]
    tl.store(y + place, tl.trans(result), mask=is_result)


@triton.jit
def product(x, weights, y, residual, bias, num_rows, N: tl.constexpr, K: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
            HAS_RESIDUAL: tl.constexpr, PREFETCH: tl.constexpr,
            IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute y[M, N] = x[M, K] @ weights[N, K].T in y's type, plus `residual` [M, N].

    `bias` [N], float32, is added to the sum before it is rounded; None: there is none.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * BN + tl.arange(0, BN)
    sources = sources_of(outputs, N, BN)
    if PREFETCH > 0:
        prefetch_rows(weights, sources, K, PREFETCH)
    begin(IS_PROGRAMMATIC)
    x_rows = x + rows[:, None].to(tl.int64) * K
    is_row = (rows < num_rows)[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    places = weights + sources[:, None].to(tl.int64) * K
    k = tl.arange(0, BK)[None, :]
    for start in range(0, K, BK):
        inputs = tl.load(x_rows + start + k, mask=is_row, other=0.0)
        total = tl.dot(tl.load(places + start + k), tl.trans(inputs), total)
    total = with_bias(total, bias, sources)
    store_sum(y, residual, total, rows, rows < num_rows, outputs, N, BN, HAS_RESIDUAL)


@triton.jit
def gate_up_product(x, weights, y, num_rows, N: tl.constexpr, K: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                    IS_GELU: tl.constexpr, PREFETCH: tl.constexpr,
                    IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute y[M, N] = silu(gate) * up, for weights [2 N, K] with the gate's rows first.

    With IS_GELU it is gelu(gate) * up, as in `store_gated`.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * BN + tl.arange(0, BN)
    sources = sources_of(outputs, N, BN)
    if PREFETCH > 0:
        prefetch_rows(weights, sources, K, PREFETCH)
        prefetch_rows(weights, sources + N, K, PREFETCH)
    begin(IS_PROGRAMMATIC)
    x_rows = x + rows[:, None].to(tl.int64) * K
    is_row = (rows < num_rows)[:, None]
    gate = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    gates = weights + sources[:, None].to(tl.int64) * K
    ups = weights + (sources + N)[:, None].to(tl.int64) * K
    k = tl.arange(0, BK)[None, :]
    for start in range(0, K, BK):
        inputs = tl.trans(tl.load(x_rows + start + k, mask=is_row, other=0.0))
        gate = tl.dot(tl.load(gates + start + k), inputs, gate)
        up = tl.dot(tl.load(ups + start + k), inputs, up)
    store_gated(y, gate, up, rows, rows < num_rows, outputs, N, BN, IS_GELU)


@triton.jit
def described_product(x, weights, y, residual, bias, num_rows, stored, N: tl.constexpr,
                      K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                      GROUP: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PREFETCH: tl.constexpr,
                      IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute `product` with tiles that the copy engine reads by their descriptions.

    `stored` is the weights' address, for prefetching.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    if PREFETCH > 0:
        prefetch_rows(stored, sources_of(tile_n * BN + tl.arange(0, BN), N, BN), K, PREFETCH)
    begin(IS_PROGRAMMATIC)
    total = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        inputs = x.load([tile_m * BM, start])
        total = tl.dot(weights.load([tile_n * BN, start]), tl.trans(inputs), total)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * BN + tl.arange(0, BN)
    total = with_bias(total, bias, sources_of(outputs, N, BN))
    store_sum(y, residual, total, rows, rows < num_rows, outputs, N, BN, HAS_RESIDUAL)


@triton.jit
def described_gate_up(x, weights, y, num_rows, stored, N: tl.constexpr, K: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                      IS_GELU: tl.constexpr, PREFETCH: tl.constexpr,
                      IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute `gate_up_product` with tiles that the copy engine reads."""
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    if PREFETCH > 0:
        sources = sources_of(tile_n * BN + tl.arange(0, BN), N, BN)
        prefetch_rows(stored, sources, K, PREFETCH)
        prefetch_rows(stored, sources + N, K, PREFETCH)
    begin(IS_PROGRAMMATIC)
    gate = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        inputs = tl.trans(x.load([tile_m * BM, start]))
        gate = tl.dot(weights.load([tile_n * BN, start]), inputs, gate)
        up = tl.dot(weights.load([N + tile_n * BN, start]), inputs, up)
    rows = tile_m * BM + tl.arange(0, BM)
    outputs = tile_n * BN + tl.arange(0, BN)
    store_gated(y, gate, up, rows, rows < num_rows, outputs, N, BN, IS_GELU)
