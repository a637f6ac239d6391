"""The primitive of products with two unpacked operands: a few rows times sixteen columns."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT64,
    VECTOR,
    constant,
    declare_fma,
    splat,
    vector_at,
)

MAX_TILE_ROWS = 6
"""Rows of the largest tile: its twelve AVX2 accumulators leave registers for the operands."""


def _tile_rows(num_rows: int) -> Any:
    """Return the tile product for exactly `num_rows` rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_stride, b, b_stride, depth, c, c_stride, is_added = args
        fma = declare_fma(builder)
        rows_a, rows_c = [], []
        for row in range(num_rows):
            offset = ir.Constant(INT64, 4 * row)
            a_row = builder.add(a, builder.mul(a_stride, offset))
            rows_a.append(builder.inttoptr(a_row, FLOAT.as_pointer()))
            rows_c.append(vector_at(builder, builder.add(c, builder.mul(c_stride, offset))))
        base_b = builder.inttoptr(b, FLOAT.as_pointer())

        start = builder.block
        load = builder.append_basic_block("load")
        begin = builder.append_basic_block("begin")
        loop = builder.append_basic_block("loop")
        end = builder.append_basic_block("end")
        builder.cbranch(builder.icmp_signed("!=", is_added, INT64(0)), load, begin)
        builder.position_at_end(load)
        loaded = [builder.load(row, align=4) for row in rows_c]
        builder.branch(begin)
        builder.position_at_end(begin)
        first = []
        for row in range(num_rows):
            phi = builder.phi(VECTOR)
            phi.add_incoming(constant(0.0), start)
            phi.add_incoming(loaded[row], load)
            first.append(phi)
        builder.branch(loop)

        builder.position_at_end(loop)
        index = builder.phi(INT64)
        index.add_incoming(INT64(0), begin)
        sums = [builder.phi(VECTOR) for _ in range(num_rows)]
        b_row = builder.gep(base_b, [builder.mul(index, b_stride)])
        b_vector = builder.load(builder.bitcast(b_row, VECTOR.as_pointer()), align=4)
        new_sums = []
        for row in range(num_rows):
            sums[row].add_incoming(first[row], begin)
            scalar = builder.load(builder.gep(rows_a[row], [index]), align=4)
            new_sums.append(builder.call(fma, [splat(builder, scalar), b_vector, sums[row]]))
        for row in range(num_rows):
            sums[row].add_incoming(new_sums[row], loop)
        next_index = builder.add(index, INT64(1))
        index.add_incoming(next_index, loop)
        builder.cbranch(builder.icmp_signed("<", next_index, depth), loop, end)

        builder.position_at_end(end)
        for row in range(num_rows):
            builder.store(new_sums[row], rows_c[row], align=4)
        return context.get_dummy_value()

    @intrinsic
    def tile_rows(
        typing: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, depth: Any, c: Any,
        c_stride: Any, is_added: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 8), codegen

    return tile_rows


_rows_1, _rows_2, _rows_3 = _tile_rows(1), _tile_rows(2), _tile_rows(3)
_rows_4, _rows_5, _rows_6 = _tile_rows(4), _tile_rows(5), _tile_rows(6)


@njit(nogil=True, cache=True, error_model="numpy")
def tile_product(
    rows: int, a: int, a_stride: int, b: int, b_stride: int, depth: int, c: int, c_stride: int,
    is_added: int,
) -> None:  # fmt: skip
    """Compute `c[r, 0:16] (+)= Σ_k a[r, k] · b[k, 0:16]` for `rows` ≤ 6 and `depth` ≥ 1.

    With `is_added` the chains start from the values in `c`, else from zero. Each of the `rows × 16`
    elements is one chain of fused multiply-adds in the order of k.
    """
    if rows == 6:
        _rows_6(a, a_stride, b, b_stride, depth, c, c_stride, is_added)
    elif rows == 5:
        _rows_5(a, a_stride, b, b_stride, depth, c, c_stride, is_added)
    elif rows == 4:
        _rows_4(a, a_stride, b, b_stride, depth, c, c_stride, is_added)
    elif rows == 3:
        _rows_3(a, a_stride, b, b_stride, depth, c, c_stride, is_added)
    elif rows == 2:
        _rows_2(a, a_stride, b, b_stride, depth, c, c_stride, is_added)
    else:
        _rows_1(a, a_stride, b, b_stride, depth, c, c_stride, is_added)
