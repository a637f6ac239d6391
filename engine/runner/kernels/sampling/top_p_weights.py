"""The weights e^-depth that top-p adds up, a vector of tokens at a time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import (
    INT64,
    INT_VECTOR,
    LANES,
    VECTOR,
    constant,
    declare_fma,
    prefetch,
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


def _reduced_exp(builder: Any, x: Any) -> tuple[Any, Any]:
    """Emit (v, s) with e^x = v · 2^n, for |x| < 104; n is in the low bits of the float s."""
    fma = declare_fma(builder)
    shifted = builder.fadd(builder.fmul(x, _LOG2_E), _ROUNDER)
    n = builder.fsub(shifted, _ROUNDER)
    r = builder.call(fma, [n, _MINUS_LN2_HIGH, x])
    r = builder.call(fma, [n, _MINUS_LN2_LOW, r])
    value = builder.fdiv(_horner(builder, r, _NUMERATOR), _horner(builder, r, _DENOMINATOR))
    return value, shifted


def _exp_of_shallow(builder: Any, x: Any) -> Any:
    """Emit what `_exp` does for -`SHALLOW_ROW` ≤ x ≤ 0, where 2^n only changes the exponent."""
    value, shifted = _reduced_exp(builder, x)
    added = builder.shl(builder.bitcast(shifted, INT_VECTOR), ir.Constant(INT_VECTOR, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(value, INT_VECTOR), added), VECTOR)


def _exp(builder: Any, x: Any) -> Any:
    """Emit e^x for x ≤ 0, as numpy computes it with AVX-512, to the last bit.

    A rational approximation after Cody-Waite reduction; results below the smallest normal number
    are rounded once, in the last multiplication.
    """
    is_lowest = builder.fcmp_ordered("<", x, _LOWEST)
    value, shifted = _reduced_exp(builder, builder.select(is_lowest, _LOWEST, x))
    n = builder.fsub(shifted, _ROUNDER)
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


SHORTLIST_DEPTHS = (4.0, 8.0, 10.0, 12.0)
"""Nats for which `add_weights` adds up the weights of shallower tokens."""


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


MOST_TEMPERATURE = 2.0**20
"""`add_weights` requires a temperature at most that high."""
_DEEPEST = constant(-(2.0**62))
"""Deeper tokens weigh nothing at any such temperature, and infinity would become NaN."""
SHALLOW_ROW = 86.0
"""Depth up to which no weight is smaller than the smallest normal number."""


def _quotient(builder: Any, x: Any, divisor: Any, reciprocal: Any) -> Any:
    """Emit x / divisor, rounded as a division is, in five operations that pipelines overlap.

    The first correction is off by one unit in the last place at most, and then the second one is
    right (Markstein 1990), unless a remainder underflows. With a temperature as `add_weights` asks
    for, that happens only to depths so small that their weight is 1.
    """
    fma = declare_fma(builder)
    quotient = builder.fmul(x, reciprocal)
    for _ in range(2):
        rest = builder.call(fma, [builder.fneg(quotient), divisor, x])
        quotient = builder.call(fma, [rest, reciprocal, quotient])
    return quotient


_PARAMETERS = [types.int64] * 2 + [types.float32] * 2 + [types.int64] * 3


def _emit_weights(
    builder: Any, exp: Any, values: Any, num_vectors: Any, largest: Any, temperature: Any,
    sums: Any, shallow: Any, following: Any,
) -> None:  # fmt: skip
    largest, temperature = splat(builder, largest), splat(builder, temperature)
    reciprocal = builder.fdiv(constant(1.0), temperature)
    pointers = [vector_at(builder, sums, _DOUBLES)]
    for number in range(len(SHORTLIST_DEPTHS)):
        at = builder.add(shallow, INT64(4 * LANES * number))
        pointers.append(vector_at(builder, at))
    before = [builder.load(pointer, align=4) for pointer in pointers]
    start = builder.block
    loop = builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    index.add_incoming(INT64(0), start)
    phis = [builder.phi(one.type) for one in before]
    offset = builder.mul(index, INT64(4 * LANES))
    prefetch(builder, builder.add(following, offset))
    value = builder.load(vector_at(builder, builder.add(values, offset)), align=4)
    difference = builder.fsub(value, largest)
    if exp is _exp:
        is_deepest = builder.fcmp_ordered("<", difference, _DEEPEST)
        difference = builder.select(is_deepest, _DEEPEST, difference)
    height = _quotient(builder, difference, temperature, reciprocal)  # -depth
    weight = exp(builder, height)
    totals = [builder.fadd(phis[0], builder.fpext(weight, _DOUBLES))]
    for within, phi in zip(SHORTLIST_DEPTHS, phis[1:], strict=True):
        is_shallow = builder.fcmp_ordered(">", height, constant(-within))
        totals.append(builder.select(is_shallow, builder.fadd(phi, weight), phi))
    for phi, first, total in zip(phis, before, totals, strict=True):
        phi.add_incoming(first, start)
        phi.add_incoming(total, loop)
    next_index = builder.add(index, INT64(1))
    index.add_incoming(next_index, loop)
    builder.cbranch(builder.icmp_signed("<", next_index, num_vectors), loop, end)
    builder.position_at_end(end)
    for pointer, total in zip(pointers, totals, strict=True):
        builder.store(total, pointer, align=4)


@intrinsic
def add_weights(
    typing: Any,
    values: Any,
    num_vectors: Any,
    largest: Any,
    temperature: Any,
    sums: Any,
    shallow: Any,
    following: Any,
) -> Any:
    """Add e^-depth of `16 · num_vectors` logits, at least one vector, to chains of sums.

    The sixteen float64 at `sums` are one chain per lane. After `shallow` each of
    `SHORTLIST_DEPTHS` has sixteen float32, to which only the weights of shallower tokens are added.
    Meanwhile as many logits at `following` are brought into the cache.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_weights(builder, _exp, *args)
        return context.get_dummy_value()

    return types.void(*_PARAMETERS), codegen


@intrinsic
def add_shallow_weights(
    typing: Any,
    values: Any,
    num_vectors: Any,
    largest: Any,
    temperature: Any,
    sums: Any,
    shallow: Any,
    following: Any,
) -> Any:
    """Do what `add_weights` does, a quarter faster, where no depth is above `SHALLOW_ROW`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_weights(builder, _exp_of_shallow, *args)
        return context.get_dummy_value()

    return types.void(*_PARAMETERS), codegen
