"""Whole rows of depths at a time: the weights e^-depth that top-p adds up, and shallow tokens."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import (
    INT32,
    INT64,
    INT_VECTOR,
    LANES,
    VECTOR,
    constant,
    declare_fma,
    splat,
    vector_at,
)

_DOUBLE = ir.DoubleType()
_DOUBLES = ir.VectorType(_DOUBLE, LANES)
_LOWEST = constant(-103.97208404541015625)
"""e^x is less than half of the smallest float below this."""
_LOG2_E = constant(1.4426950408889634)
_ROUNDER = constant(12582912.0)  # 1.5 · 2^23: adding it rounds to an integer
_MINUS_LN2_HIGH, _MINUS_LN2_LOW = constant(-6.93145752e-1), constant(-1.42860677e-6)
_NUMERATOR = (
    5.082762527590693718096e-04,
    6.757896990527504603057e-03,
    5.114512081637298353406e-02,
    2.473615434895520810817e-01,
    7.257664613233124478488e-01,
    9.999999999980870924916e-01,
)
_DENOMINATOR = (2.159509375685829852307e-02, -2.742335390411667452936e-01, 1.0)
_LEAST_EXPONENT = -126


def _horner(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    value = constant(coefficients[0])
    for coefficient in coefficients[1:]:
        value = builder.call(declare_fma(builder), [value, x, constant(coefficient)])
    return value


def _power_of_two(builder: Any, exponents: Any) -> Any:
    """Return 2^exponents as floats, for exponents of normal numbers."""
    biased = builder.add(exponents, ir.Constant(INT_VECTOR, [127] * LANES))
    return builder.bitcast(builder.shl(biased, ir.Constant(INT_VECTOR, [23] * LANES)), VECTOR)


def _exp(builder: Any, x: Any) -> Any:
    """Emit e^x for x ≤ 0, as numpy computes it with AVX-512, to the last bit.

    A rational approximation after Cody-Waite reduction; results below the smallest normal number
    are rounded once, in the last multiplication.
    """
    fma = declare_fma(builder)
    is_lowest = builder.fcmp_ordered("<", x, _LOWEST)
    x = builder.select(is_lowest, _LOWEST, x)
    n = builder.fadd(builder.fmul(x, _LOG2_E), _ROUNDER)
    n = builder.fsub(n, _ROUNDER)
    r = builder.call(fma, [n, _MINUS_LN2_HIGH, x])
    r = builder.call(fma, [n, _MINUS_LN2_LOW, r])
    value = builder.fdiv(_horner(builder, r, _NUMERATOR), _horner(builder, r, _DENOMINATOR))
    exponents = builder.fptosi(n, INT_VECTOR)
    least = ir.Constant(INT_VECTOR, [_LEAST_EXPONENT] * LANES)
    is_small = builder.icmp_signed("<", exponents, least)
    first = builder.select(is_small, least, exponents)
    rest = builder.sub(exponents, first)
    # `rest` is 0, or about -24 where the result has fewer bits; multiplying by 2^first comes first
    # there, so the value is brought down by `rest` while it is still a normal number.
    value = builder.fmul(value, _power_of_two(builder, rest))
    value = builder.fmul(value, _power_of_two(builder, first))
    return builder.select(is_lowest, constant(0.0), value)


SHORTLIST_DEPTHS = (4.0, 8.0, 12.0)
"""Nats for which `sum_weights` adds up the weights of shallower tokens."""


def _add_lanes(builder: Any, lanes: Any) -> Any:
    total = builder.extract_element(lanes, INT32(0))
    for lane in range(1, LANES):
        total = builder.fadd(total, builder.extract_element(lanes, INT32(lane)))
    return total


@intrinsic
def write_weights(typing: Any, depths: Any, weights: Any, num_vectors: Any) -> Any:
    """Set `weights = e^-depths` for `16 · num_vectors` floats."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        depths, weights, num_vectors = args
        start = builder.block
        loop = builder.append_basic_block("loop")
        end = builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(INT64)
        index.add_incoming(INT64(0), start)
        offset = builder.mul(index, INT64(4 * LANES))
        depth = builder.load(vector_at(builder, builder.add(depths, offset)), align=4)
        weight = _exp(builder, builder.fneg(depth))
        builder.store(weight, vector_at(builder, builder.add(weights, offset)), align=4)
        following = builder.add(index, INT64(1))
        index.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_vectors), loop, end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def sum_weights(typing: Any, depths: Any, num_vectors: Any, shallow: Any) -> Any:
    """Return the sum of e^-depth over `16 · num_vectors` floats, in float64.

    The sums of the weights whose depth is below each of `SHORTLIST_DEPTHS` go to the float64s at
    `shallow`. A sum has sixteen chains, one per lane, which are then added in order.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        depths, num_vectors, shallow = args
        none = ir.Constant(_DOUBLES, [0.0] * LANES)
        start = builder.block
        loop = builder.append_basic_block("loop")
        end = builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(INT64)
        index.add_incoming(INT64(0), start)
        sums = [builder.phi(_DOUBLES) for _ in (*SHORTLIST_DEPTHS, None)]
        offset = builder.mul(index, INT64(4 * LANES))
        depth = builder.load(vector_at(builder, builder.add(depths, offset)), align=4)
        weight = _exp(builder, builder.fneg(depth))
        parts = [
            builder.select(builder.fcmp_ordered("<", depth, constant(end)), weight, constant(0.0))
            for end in SHORTLIST_DEPTHS
        ]
        totals = []
        for phi, part in zip(sums, [*parts, weight], strict=True):
            totals.append(builder.fadd(phi, builder.fpext(part, _DOUBLES)))
            phi.add_incoming(none, start)
            phi.add_incoming(totals[-1], loop)
        following = builder.add(index, INT64(1))
        index.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_vectors), loop, end)
        builder.position_at_end(end)
        shallow_at = builder.inttoptr(shallow, _DOUBLE.as_pointer())
        for number, lanes in enumerate(totals[:-1]):
            place = builder.gep(shallow_at, [INT64(number)])
            builder.store(_add_lanes(builder, lanes), place, align=8)
        return _add_lanes(builder, totals[-1])

    return types.float64(*[types.int64] * 3), codegen


@intrinsic
def below_mask(typing: Any, address: Any, limit: Any) -> Any:
    """Return which of the 64 floats at `address` are below `limit`: bit i is float i's."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        limits = splat(builder, args[1])
        mask = INT64(0)
        for first in range(0, 64, LANES):
            place = vector_at(builder, builder.add(args[0], INT64(4 * first)))
            is_below = builder.fcmp_ordered("<", builder.load(place, align=4), limits)
            bits = builder.zext(builder.bitcast(is_below, ir.IntType(LANES)), INT64)
            mask = builder.or_(mask, builder.shl(bits, INT64(first)))
        return mask

    return types.int64(types.int64, types.float32), codegen


@intrinsic
def lowest_bit(typing: Any, mask: Any) -> Any:
    """Return the number of the lowest bit of `mask` that is set; `mask` is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), codegen
