"""Vector functions of a decoder besides products: sixteen floats at a time, in a fixed order."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT32,
    INT64,
    INT_VECTOR,
    LANES,
    VECTOR,
    constant,
    declare_fma,
    fold,
    over_vectors,
    splat,
    vector_at,
)

KEY_TILE = 64
"""Keys of one attention tile: four vectors of scores."""

_HALF = ir.VectorType(FLOAT, 8)
_LOWEST, _HIGHEST = constant(-87.0), constant(88.0)
_LOG2_E = constant(1.4426950408889634)
_MINUS_LN2_HIGH, _MINUS_LN2_LOW = constant(-0.693359375), constant(2.12194440e-4)
ROUNDER = constant(12582912.0)
"""1.5 · 2^23: adding it rounds, ties to even, and leaves an integer in the bits."""
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)  # Cephes expf: (e^r - 1 - r) / r² for |r| ≤ ln 2 / 2


def _larger(builder: Any, x: Any, best: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, best), x, best)


def _sum(builder: Any, x: Any, total: Any) -> Any:
    return builder.fadd(total, x)


def _exp(builder: Any, x: Any) -> Any:
    """Emit e^x within 2 units in the last place: exactly 1 at 0, 0 below -87, capped at e^88.

    NaN stays NaN: with a weight of 0 a broken cache would look like a sound one.
    """
    fma = declare_fma(builder)
    is_lowest = builder.fcmp_ordered("<", x, _LOWEST)
    clipped = builder.select(is_lowest, _LOWEST, x)
    clipped = builder.select(builder.fcmp_ordered(">", clipped, _HIGHEST), _HIGHEST, clipped)
    shifted = builder.call(fma, [clipped, _LOG2_E, ROUNDER])
    n = builder.fsub(shifted, ROUNDER)
    r = builder.call(fma, [n, _MINUS_LN2_HIGH, clipped])
    r = builder.call(fma, [n, _MINUS_LN2_LOW, r])
    p = constant(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = builder.call(fma, [p, r, constant(coefficient)])
    value = builder.fadd(builder.call(fma, [p, builder.fmul(r, r), r]), constant(1.0))
    # The low bits of `shifted` are n; shifted left, they become the exponent of 2^n.
    bits = builder.shl(builder.bitcast(shifted, INT_VECTOR), ir.Constant(INT_VECTOR, [23] * LANES))
    bits = builder.add(bits, ir.Constant(INT_VECTOR, [0x3F800000] * LANES))
    value = builder.fmul(value, builder.bitcast(bits, VECTOR))
    return builder.select(is_lowest, constant(0.0), value)


@intrinsic
def sum_squares(typing: Any, address: Any, num_vectors: Any) -> Any:
    """Compute Σ x² over `16 · num_vectors` floats: sixteen chains, then a tree of additions."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fma = declare_fma(builder)
        total = over_vectors(
            builder, args[0], args[1], constant(0.0), lambda b, x, sums: b.call(fma, [x, x, sums])
        )
        return fold(builder, total, _sum)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def silu_product(typing: Any, gate: Any, up: Any, out: Any) -> Any:
    """Compute `out = gate / (1 + e^-gate) * up` for the sixteen floats at each address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up = (builder.load(vector_at(builder, at), align=4) for at in args[:2])
        divisor = builder.fadd(_exp(builder, builder.fneg(gate)), constant(1.0))
        product = builder.fmul(builder.fdiv(gate, divisor), up)
        builder.store(product, vector_at(builder, args[2]), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def gelu_product(typing: Any, gate: Any, up: Any, out: Any) -> Any:
    """Compute `out = gelu(gate) * up` for the sixteen floats at each address.

    It is the approximation by tanh: x · (1 + tanh(u)) / 2 = x / (1 + e^-2u), with
    u = √(2/π) · (x + 0.044715 · x³).
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up = (builder.load(vector_at(builder, at), align=4) for at in args[:2])
        cubic = builder.call(
            declare_fma(builder), [builder.fmul(gate, gate), constant(0.044715), constant(1.0)]
        )
        doubled = builder.fmul(builder.fmul(gate, cubic), constant(-2 * math.sqrt(2 / math.pi)))
        divisor = builder.fadd(_exp(builder, doubled), constant(1.0))
        product = builder.fmul(builder.fdiv(gate, divisor), up)
        builder.store(product, vector_at(builder, args[2]), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def clamped_swish_product(
    typing: Any, gate: Any, up: Any, out: Any, steepness: Any, limit: Any
) -> Any:
    """Compute `out = gate / (1 + e^(-steepness · gate)) * (up + 1)` for sixteen floats each.

    Gate is at most `limit`, and up between `-limit` and `limit`, before; NaN stays NaN.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up = (builder.load(vector_at(builder, at), align=4) for at in args[:2])
        factor, most = (splat(builder, number) for number in args[3:])

        def bounded(x: Any, bound: Any, beyond: str) -> Any:
            return builder.select(builder.fcmp_ordered(beyond, x, bound), bound, x)

        gate = bounded(gate, most, ">")
        up = bounded(bounded(up, most, ">"), builder.fneg(most), "<")
        power = _exp(builder, builder.fneg(builder.fmul(gate, factor)))
        swish = builder.fdiv(gate, builder.fadd(power, constant(1.0)))
        product = builder.fmul(swish, builder.fadd(up, constant(1.0)))
        builder.store(product, vector_at(builder, args[2]), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, types.float32), codegen


@intrinsic
def softmax_tile(typing: Any, scores: Any, maximum: Any, sums: Any) -> Any:
    """Apply one row's online softmax over a tile; return the factor of the earlier weights.

    The 64 floats at `scores` become e^(score - the largest so far). `maximum` is the address of the
    largest so far, `sums` of sixteen sums of weights, one per lane; both are updated.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [
            vector_at(builder, builder.add(args[0], INT64(4 * first)))
            for first in range(0, KEY_TILE, LANES)
        ]
        tile = [builder.load(pointer, align=4) for pointer in pointers]
        best = tile[0]
        for x in tile[1:]:
            best = _larger(builder, x, best)
        best = fold(builder, best, _larger)
        maximum_at = builder.inttoptr(args[1], FLOAT.as_pointer())
        old = builder.load(maximum_at, align=4)
        new = _larger(builder, best, old)
        builder.store(new, maximum_at, align=4)
        rescale = _exp(builder, splat(builder, builder.fsub(old, new)))
        sums_at = vector_at(builder, args[2])
        total = builder.fmul(builder.load(sums_at, align=4), rescale)
        shift = splat(builder, new)
        for x, pointer in zip(tile, pointers, strict=True):
            weights = _exp(builder, builder.fsub(x, shift))
            builder.store(weights, pointer, align=4)
            total = builder.fadd(total, weights)
        builder.store(total, sums_at, align=4)
        return builder.extract_element(rescale, INT32(0))

    return types.float32(*[types.int64] * 3), codegen


@intrinsic
def exponential(typing: Any, x: Any) -> Any:
    """Compute e^x of one float, with the same bits as `softmax_tile`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_exp(builder, splat(builder, args[0])), INT32(0))

    return types.float32(types.float32), codegen


@intrinsic
def transpose_8x8(typing: Any, source: Any, source_stride: Any, target: Any, stride: Any) -> Any:
    """Set `target[j, i] = source[i, j]` for an 8 × 8 block of floats; strides in elements."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, source_stride, target, stride = args
        rows = []
        for i in range(8):
            offset = builder.mul(source_stride, INT64(4 * i))
            rows.append(
                builder.load(vector_at(builder, builder.add(source, offset), _HALF), align=4)
            )
        emit_transpose(builder, rows, target, stride)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def emit_transpose(builder: Any, rows: list[Any], target: Any, stride: Any) -> None:
    """Emit `target[j, i] = rows[i][j]` for eight vectors of eight floats; stride in elements."""
    for width in (4, 2, 1):  # swap the off-diagonal halves, then quarters, then elements
        low = [i if i & width == 0 else 8 + i - width for i in range(8)]
        high = [i + width if i & width == 0 else 8 + i for i in range(8)]
        masks = [ir.Constant(ir.VectorType(INT32, 8), mask) for mask in (low, high)]
        swapped = list(rows)
        for i in range(8):
            if i & width == 0:
                pair = rows[i], rows[i + width]
                swapped[i] = builder.shuffle_vector(*pair, masks[0])
                swapped[i + width] = builder.shuffle_vector(*pair, masks[1])
        rows = swapped
    for j in range(8):
        offset = builder.mul(stride, INT64(4 * j))
        builder.store(rows[j], vector_at(builder, builder.add(target, offset), _HALF), align=4)


@intrinsic
def put_sums(typing: Any, sums: Any, bias: Any, residual: Any, out: Any) -> Any:
    """Write the sixteen floats at `sums`, plus those at `bias`, plus those at `residual`, to `out`.

    The address 0 adds nothing.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, bias, residual, out = args
        total = builder.load(vector_at(builder, sums), align=4)
        for address in (bias, residual):
            before = builder.block
            add, after = builder.append_basic_block("add"), builder.append_basic_block("after")
            builder.cbranch(builder.icmp_signed("!=", address, INT64(0)), add, after)
            builder.position_at_end(add)
            more = builder.fadd(total, builder.load(vector_at(builder, address), align=4))
            builder.branch(after)
            builder.position_at_end(after)
            phi = builder.phi(VECTOR)
            phi.add_incoming(total, before)
            phi.add_incoming(more, add)
            total = phi
        builder.store(total, vector_at(builder, out), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
