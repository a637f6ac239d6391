"""Rows of activations in int8: each row by itself, in blocks of 32 values.

A block is a record of one cache line: 32 signed bytes; the float32 step; the step times the sum of
the bytes; then as int32 the sum times -8, -16 and -128, and the sums of either half times -32,
which take the offsets of the weights' numbers out of the integer products before they begin.

The step is the largest magnitude / 127, and a byte is the value / step, rounded to nearest, ties to
even. A value that is not finite makes the step not finite, and so everything computed from it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.runner.kernels.products.block_layout import BLOCK
from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT32,
    INT64,
    INT_VECTOR,
    LANES,
    constant,
    fold,
    int_constant,
    splat,
    vector_at,
)

RECORD_BYTES = 64
STEP_AT, SUM_AT = 32, 36
OFFSET_AT = {8: 40, 16: 44, 128: 48, 32: 52}
"""Offsets in a record of minus the sum of its bytes, times an offset; for 32 two halves' sums."""
BYTES_PER_VALUE = RECORD_BYTES // BLOCK
"""Bytes of a row in int8 by value, with its blocks' steps and sums."""
_LARGEST_BYTE = 127.0
_ROUNDER = 12582912.0  # 1.5 · 2^23: adding it rounds, and leaves an integer in the low bits
_LANE_BYTES = ir.VectorType(ir.IntType(8), LANES)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


def _add(builder: Any, x: Any, y: Any) -> Any:
    return builder.add(x, y)


def _emit_block(builder: Any, source: Any, target: Any) -> None:
    halves = [
        builder.load(vector_at(builder, builder.add(source, INT64(at))), align=4)
        for at in (0, 4 * LANES)
    ]
    # Magnitudes compare as integers in their order, with NaN above everything.
    sizes = [
        builder.and_(builder.bitcast(half, INT_VECTOR), int_constant(0x7FFFFFFF)) for half in halves
    ]
    largest = builder.bitcast(fold(builder, _larger(builder, *sizes), _larger), FLOAT)
    step = builder.fdiv(largest, FLOAT(_LARGEST_BYTE))
    is_zero = builder.fcmp_ordered("==", largest, FLOAT(0.0))
    steps = builder.select(is_zero, FLOAT(0.0), builder.fdiv(FLOAT(_LARGEST_BYTE), largest))
    factor = splat(builder, steps)
    sums = []
    for number, half in enumerate(halves):
        rounded = builder.fadd(builder.fmul(half, factor), constant(_ROUNDER))
        stored = builder.trunc(builder.bitcast(rounded, INT_VECTOR), _LANE_BYTES)
        pointer = builder.add(target, INT64(number * LANES))
        builder.store(stored, vector_at(builder, pointer, _LANE_BYTES), align=LANES)
        sums.append(fold(builder, builder.sext(stored, INT_VECTOR), _add))
    total = builder.add(*sums)

    def put(value: Any, at: int) -> None:
        pointer = builder.inttoptr(builder.add(target, INT64(at)), value.type.as_pointer())
        builder.store(value, pointer, align=4)

    put(step, STEP_AT)
    put(builder.fmul(step, builder.sitofp(total, FLOAT)), SUM_AT)
    for offset in (8, 16, 128):
        put(builder.mul(total, INT32(-offset)), OFFSET_AT[offset])
    for number, half_sum in enumerate(sums):
        put(builder.mul(half_sum, INT32(-32)), OFFSET_AT[32] + 4 * number)
    put(INT32(0), RECORD_BYTES - 4)


@intrinsic
def _quantise_block(typing: Any, source: Any, target: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_block(builder, *args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@njit(nogil=True, cache=True, error_model="numpy")
def quantise_row(source: int, depth: int, target: int) -> None:
    """Write the `depth` floats at `source`, a multiple of 32, as records to `target`."""
    for block in range(depth // BLOCK):
        _quantise_block(source + 4 * BLOCK * block, target + RECORD_BYTES * block)
