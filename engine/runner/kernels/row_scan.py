"""Look at a whole row of logits: its largest values by block, and tokens near the likeliest one."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
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


def depth_of(builder: Any, values: Any, largest: Any, temperature: Any) -> Any:
    """Emit (largest - value) / temperature; see `filters`."""
    return builder.fdiv(builder.fsub(largest, values), temperature)


@intrinsic
def scan_blocks(typing: Any, values: Any, num_blocks: Any, maxima: Any) -> Any:
    """Write the largest of each `BLOCK` floats to `maxima`; return the largest magnitude's bits.

    The bits are an int32, larger than those of every finite float if one of the floats is NaN or
    infinite; the maxima are then not defined. `num_blocks` is at least 1.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, num_blocks, maxima = args
        magnitude = ir.Constant(INT_VECTOR, [0x7FFFFFFF] * LANES)
        start = builder.block
        loop = builder.append_basic_block("loop")
        end = builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        index, bits = builder.phi(INT64), builder.phi(INT_VECTOR)
        index.add_incoming(INT64(0), start)
        bits.add_incoming(ir.Constant(INT_VECTOR, [0] * LANES), start)
        block = builder.add(values, builder.mul(index, INT64(4 * BLOCK)))
        largest, most = None, bits
        for number in range(_VECTORS):
            at = vector_at(builder, builder.add(block, INT64(4 * LANES * number)))
            value = builder.load(at, align=4)
            own = builder.and_(builder.bitcast(value, INT_VECTOR), magnitude)
            most = _larger_int(builder, own, most)
            largest = value if largest is None else _larger(builder, value, largest)
        place = builder.inttoptr(
            builder.add(maxima, builder.mul(index, INT64(4))), ir.FloatType().as_pointer()
        )
        builder.store(fold(builder, largest, _larger), place, align=4)
        following = builder.add(index, INT64(1))
        index.add_incoming(following, loop)
        bits.add_incoming(most, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_blocks), loop, end)
        builder.position_at_end(end)
        return fold(builder, most, _larger_int)

    return types.int32(*[types.int64] * 3), codegen


@intrinsic
def shallow_mask(typing: Any, values: Any, largest: Any, temperature: Any, within: Any) -> Any:
    """Return which of the `BLOCK` floats at `values` have a depth below `within`: bit i is i's."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        largest, temperature, within = (splat(builder, one) for one in args[1:])
        mask = INT64(0)
        for first in range(0, BLOCK, LANES):
            place = vector_at(builder, builder.add(args[0], INT64(4 * first)))
            depth = depth_of(builder, builder.load(place, align=4), largest, temperature)
            is_below = builder.fcmp_ordered("<", depth, within)
            bits = builder.zext(builder.bitcast(is_below, ir.IntType(LANES)), INT64)
            mask = builder.or_(mask, builder.shl(bits, INT64(first)))
        return mask

    return types.int64(types.int64, *[types.float32] * 3), codegen


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
