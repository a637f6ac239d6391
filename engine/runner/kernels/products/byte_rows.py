"""Rows of activations in int8: each row by itself, in groups of 32 values.

A group is a record of one cache line: 32 signed bytes; the float32 steps of its two halves; the sum
of the bytes, each times its step, and that times -128; then as int32 the sum of all bytes times -8
and -16, and the sums of either half times -32. They take the offsets of the weights' numbers out of
the products before they begin.

A step is the largest magnitude / 127: of a group's values, or in a fine row of a half's. A byte is
the value / step, rounded to nearest, ties to even. A value that is not finite makes the step not
finite, and so everything computed from it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.runner.kernels.products.group_layout import GROUP
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
STEPS_AT, SUM_AT = 32, 40
SCALED_OFFSET, SCALED_OFFSET_AT = 128, 44
"""An offset, and where a record has minus that times the scaled sum."""
OFFSET_AT = {8: 48, 16: 52}
"""Offsets in a record of minus the sum of its bytes, times an offset."""
HALVES, HALVES_OFFSET, HALVES_OFFSET_AT = 2, 32, 56
"""The halves of a record, an offset, and where minus their sums times it begin."""
BYTES_PER_VALUE = RECORD_BYTES // GROUP
"""Bytes of a row in int8 by value, with its groups' steps and sums."""
_LARGEST_BYTE = 127.0
_ROUNDER = 12582912.0  # 1.5 · 2^23: adding it rounds, and leaves an integer in the low bits
_LANE_BYTES = ir.VectorType(ir.IntType(8), LANES)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


def _add(builder: Any, x: Any, y: Any) -> Any:
    return builder.add(x, y)


def _put(builder: Any, value: Any, record: Any, at: int) -> None:
    pointer = builder.inttoptr(builder.add(record, INT64(at)), value.type.as_pointer())
    builder.store(value, pointer, align=4)


def _largest_magnitudes(builder: Any, halves: list[Any], is_fine: Any) -> list[Any]:
    """Emit the largest magnitude of each half; both are the larger one unless `is_fine`."""
    # Magnitudes compare as integers in their order, with NaN above everything.
    found = [
        fold(
            builder,
            builder.and_(builder.bitcast(half, INT_VECTOR), int_constant(0x7FFFFFFF)),
            _larger,
        )
        for half in halves
    ]
    both = _larger(builder, *found)
    return [builder.bitcast(builder.select(is_fine, one, both), FLOAT) for one in found]


def _emit_group(builder: Any, source: Any, target: Any, is_fine: Any) -> None:
    halves = [
        builder.load(vector_at(builder, builder.add(source, INT64(at))), align=4)
        for at in (0, 4 * LANES)
    ]
    sums, scaled = [], []
    for number, largest in enumerate(_largest_magnitudes(builder, halves, is_fine)):
        step = builder.fdiv(largest, FLOAT(_LARGEST_BYTE))
        is_zero = builder.fcmp_ordered("==", largest, FLOAT(0.0))
        steps = builder.select(is_zero, FLOAT(0.0), builder.fdiv(FLOAT(_LARGEST_BYTE), largest))
        factor = splat(builder, steps)
        rounded = builder.fadd(builder.fmul(halves[number], factor), constant(_ROUNDER))
        stored = builder.trunc(builder.bitcast(rounded, INT_VECTOR), _LANE_BYTES)
        pointer = builder.add(target, INT64(number * LANES))
        builder.store(stored, vector_at(builder, pointer, _LANE_BYTES), align=LANES)
        sums.append(fold(builder, builder.sext(stored, INT_VECTOR), _add))
        scaled.append(builder.fmul(step, builder.sitofp(sums[-1], FLOAT)))
        _put(builder, step, target, STEPS_AT + 4 * number)
        lost = builder.mul(sums[-1], INT32(-HALVES_OFFSET))
        _put(builder, lost, target, HALVES_OFFSET_AT + 4 * number)
    scaled_sum = builder.fadd(*scaled)
    _put(builder, scaled_sum, target, SUM_AT)
    lost = builder.fmul(scaled_sum, FLOAT(-SCALED_OFFSET))
    _put(builder, lost, target, SCALED_OFFSET_AT)
    total = builder.add(*sums)
    for offset, at in OFFSET_AT.items():
        _put(builder, builder.mul(total, INT32(-offset)), target, at)


@intrinsic
def _quantise_group(typing: Any, source: Any, target: Any, is_fine: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target, is_fine = args
        _emit_group(builder, source, target, is_fine)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean), codegen


@njit(nogil=True, cache=True, error_model="numpy")
def quantise_row(source: int, depth: int, target: int, is_fine: bool) -> None:
    """Write the `depth` floats at `source`, a multiple of 32, as records to `target`."""
    for group in range(depth // GROUP):
        _quantise_group(source + 4 * GROUP * group, target + RECORD_BYTES * group, is_fine)
