"""Look at a whole row of logits: its largest values by block, and tokens near the likeliest one."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import (
    INT64,
    INT_VECTOR,
    LANES,
    fold,
    splat,
    vector_at,
)

BLOCK = 64
"""Adjacent tokens of which the largest logit is found together."""
_VECTORS = BLOCK // LANES


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _larger_int(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


def _emit_scan(builder: Any, values: Any, num_blocks: Any, maxima: Any, copies: Any) -> Any:
    """Emit `scan_blocks`; the floats are also written to the address `copies`, if there is one."""
    magnitude = ir.Constant(INT_VECTOR, [0x7FFFFFFF] * LANES)
    start = builder.block
    loop = builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, bits = builder.phi(INT64), builder.phi(INT_VECTOR)
    index.add_incoming(INT64(0), start)
    bits.add_incoming(ir.Constant(INT_VECTOR, [0] * LANES), start)
    offset = builder.mul(index, INT64(4 * BLOCK))
    largest, most = None, bits
    for number in range(_VECTORS):
        own_offset = builder.add(offset, INT64(4 * LANES * number))
        value = builder.load(vector_at(builder, builder.add(values, own_offset)), align=4)
        if copies is not None:
            pointer = vector_at(builder, builder.add(copies, own_offset))
            builder.store(value, pointer, align=4)
        own = builder.and_(builder.bitcast(value, INT_VECTOR), magnitude)
        most = _larger_int(builder, own, most)
        largest = value if largest is None else _larger(builder, value, largest)
    pointer = builder.inttoptr(
        builder.add(maxima, builder.mul(index, INT64(4))), ir.FloatType().as_pointer()
    )
    builder.store(fold(builder, largest, _larger), pointer, align=4)
    following = builder.add(index, INT64(1))
    index.add_incoming(following, loop)
    bits.add_incoming(most, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_blocks), loop, end)
    builder.position_at_end(end)
    return fold(builder, most, _larger_int)


@intrinsic
def scan_blocks(typing: Any, values: Any, num_blocks: Any, maxima: Any) -> Any:
    """Write the largest of each `BLOCK` floats to `maxima`; return the largest magnitude's bits.

    The bits are an int32, larger than those of every finite float if one of the floats is NaN or
    infinite; the maxima are then not defined. `num_blocks` is at least 1.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, count, largest = args
        return _emit_scan(builder, start, count, largest, None)

    return types.int32(*[types.int64] * 3), codegen


@intrinsic
def copy_blocks(typing: Any, values: Any, num_blocks: Any, maxima: Any, copies: Any) -> Any:
    """Do what `scan_blocks` does, and copy the floats, which are read from memory only once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_scan(builder, *args)

    return types.int32(*[types.int64] * 4), codegen


@intrinsic
def mask_from(typing: Any, values: Any, least: Any) -> Any:
    """Return which of the `BLOCK` floats at `values` are at least `least`: bit i is i's."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        least = splat(builder, args[1])
        mask = INT64(0)
        for first in range(0, BLOCK, LANES):
            pointer = vector_at(builder, builder.add(args[0], INT64(4 * first)))
            is_there = builder.fcmp_ordered(">=", builder.load(pointer, align=4), least)
            bits = builder.zext(builder.bitcast(is_there, ir.IntType(LANES)), INT64)
            mask = builder.or_(mask, builder.shl(bits, INT64(first)))
        return mask

    return types.int64(types.int64, types.float32), codegen


@njit("float32(float32, float32, float32)", nogil=True, cache=True, error_model="numpy")
def least_shallow(largest: float, temperature: float, within: float) -> float:
    """Return the smallest value whose depth is below `within`, which is above 0.

    Neither a subtraction nor a division changes an order, so a value is that shallow exactly if it
    is at least this one: found by halving, since floats are in the order of their bits.
    """
    one = np.empty(1, np.float32)
    bits = one.view(np.int32)
    one[0] = largest
    shallow, deep = np.int64(bits[0]), np.int64(-0x7F800000)  # the largest, and -infinity
    if shallow < 0:
        shallow = -(shallow & 0x7FFFFFFF)
    while shallow - deep > 1:
        middle = deep + (shallow - deep) // 2
        bits[0] = np.int32(middle if middle >= 0 else -middle)
        value = one[0] if middle >= 0 else -one[0]
        if (largest - value) / temperature < within:
            shallow = middle
        else:
            deep = middle
    bits[0] = np.int32(shallow if shallow >= 0 else -shallow)
    return one[0] if shallow >= 0 else -one[0]


@intrinsic
def lowest_bit(typing: Any, mask: Any) -> Any:
    """Return the number of the lowest bit of `mask` that is set, 0 if there is none."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.and_(number, INT64(BLOCK - 1))

    return types.int64(types.int64), codegen


@intrinsic
def count_bits(typing: Any, mask: Any) -> Any:
    """Return how many bits of `mask` are set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.int64), codegen
