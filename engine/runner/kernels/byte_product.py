"""The tile product on weights of one byte each, scaled by output: a quarter of the traffic.

A panel's sixteen columns are `depth` rows of sixteen signed bytes, then their sixteen scales as
floats. Widening a byte is exact. An element is two chains of fused multiply-adds, over the even and
over the odd inner indices, since a single one could not keep up with the memory; their sum times
its column's scale is the same whatever rows share a tile.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT64,
    INT_VECTOR,
    LANES,
    VECTOR,
    constant,
    declare_fma,
    splat,
    vector_at,
)

SCALE_ROWS = 4
"""Rows of a panel that its scales take the place of: 16 floats are 64 bytes."""
_CHAINS = 2
_BYTES = ir.VectorType(ir.IntType(8), LANES)


def _byte_rows(num_rows: int) -> Any:
    """The product for exactly `num_rows` rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, depth, c = args
        fma = declare_fma(builder)
        rows_a, rows_c = [], []
        for row in range(num_rows):
            a_row = builder.add(a, builder.mul(depth, INT64(4 * row)))
            rows_a.append(builder.inttoptr(a_row, FLOAT.as_pointer()))
            rows_c.append(vector_at(builder, builder.add(c, INT64(4 * LANES * row))))
        start = builder.block
        loop = builder.append_basic_block("loop")
        end = builder.append_basic_block("end")
        builder.branch(loop)

        builder.position_at_end(loop)
        index = builder.phi(INT64)
        index.add_incoming(INT64(0), start)
        sums = [[builder.phi(VECTOR) for _ in range(_CHAINS)] for _ in range(num_rows)]
        new_sums: list[list[Any]] = [[] for _ in range(num_rows)]
        for chain in range(_CHAINS):
            k = builder.add(index, INT64(chain))
            b_at = builder.add(b, builder.mul(k, INT64(LANES)))
            stored = builder.load(vector_at(builder, b_at, _BYTES), align=LANES)
            b_vector = builder.sitofp(builder.sext(stored, INT_VECTOR), VECTOR)
            for row in range(num_rows):
                scalar = splat(builder, builder.load(builder.gep(rows_a[row], [k]), align=4))
                old = sums[row][chain]
                new = builder.call(fma, [scalar, b_vector, old])
                old.add_incoming(constant(0.0), start)
                old.add_incoming(new, loop)
                new_sums[row].append(new)
        next_index = builder.add(index, INT64(_CHAINS))
        index.add_incoming(next_index, loop)
        builder.cbranch(builder.icmp_signed("<", next_index, depth), loop, end)

        builder.position_at_end(end)
        scales_at = builder.add(b, builder.mul(depth, INT64(LANES)))
        scales = builder.load(vector_at(builder, scales_at), align=LANES)
        for row, (even, odd) in enumerate(new_sums):
            scaled = builder.fmul(builder.fadd(even, odd), scales)
            builder.store(scaled, rows_c[row], align=4)
        return context.get_dummy_value()

    @intrinsic
    def byte_rows(typing: Any, a: Any, b: Any, depth: Any, c: Any) -> Any:
        return types.void(*[types.int64] * 4), codegen

    return byte_rows


_rows_1, _rows_2, _rows_3 = _byte_rows(1), _byte_rows(2), _byte_rows(3)
_MAX_ROWS = 3
"""Their twelve AVX2 accumulators leave registers for the operands."""


@njit(nogil=True, cache=True, error_model="numpy")
def byte_tile_product(rows: int, a: int, b: int, depth: int, c: int) -> None:
    """`c[r, 0:16] = scale[0:16] · Σ_k a[r, k] · b[k, 0:16]` for an even `depth`.

    `a` is `[rows, depth]`, `b` one panel (aligned to its 16 lanes) and `c` `[rows, 16]`.
    """
    for first in range(0, rows, _MAX_ROWS):
        a_at, c_at = a + first * depth * 4, c + first * LANES * 4
        if rows - first >= _MAX_ROWS:
            _rows_3(a_at, b, depth, c_at)
        elif rows - first == 2:
            _rows_2(a_at, b, depth, c_at)
        else:
            _rows_1(a_at, b, depth, c_at)
