"""The primitive of products with two unpacked operands: a few rows times a few vectors of columns.

Every element is one chain of fused multiply-adds in the order of the inner index, however many rows
and columns are computed together.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT64,
    LANES,
    VECTOR,
    constant,
    declare_fma,
    keep_loads_behind,
    keep_rolled,
    splat,
    vector_at,
)

MAX_TILE_ROWS = 6
MAX_TILE_VECTORS = 4 if get_host_cpu_features().get("avx512f") else 1
"""The largest tile: its accumulators leave registers for the operands.

That is 24 of AVX-512's 32 registers, or 12 of AVX2's 16.
"""
_FLOAT_BYTES = 4


# One step of the inner index: a row of `b` is loaded into `num_vectors` registers, and each row of
# `a` contributes one number, which is spread over a register and multiplied with all of them. So
# rows + vectors loads serve rows x vectors multiply-adds, and the sums, which stay in registers for
# the whole loop, are the limit of the tile. Every sum is a chain of its own, in the order of the
# index: another number of rows or vectors in the tile changes no bit of it. The loads of `a` are
# kept in their places and the loop is not unrolled; LLVM would otherwise load ahead until
# registers are spilled.
def _emit_loop(
    builder: Any, row_ats: list[Any], b: Any, b_stride: Any, depth: Any, begun: list[list[Any]]
) -> list[list[Any]]:
    """Emit the loop over the inner index from sums that begin as `begun`; return the sums."""
    fma = declare_fma(builder)
    num_vectors = len(begun[0])
    start = builder.block
    loop = builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    index.add_incoming(INT64(0), start)
    sums = [[builder.phi(VECTOR) for _ in row] for row in begun]
    b_row = builder.add(b, builder.mul(index, b_stride))
    columns = [
        builder.load(
            vector_at(builder, builder.add(b_row, INT64(_FLOAT_BYTES * LANES * n))), align=4
        )
        for n in range(num_vectors)
    ]
    new_sums = []
    for row, row_at in enumerate(row_ats):
        keep_loads_behind(builder)
        scalar = splat(builder, builder.load(builder.gep(row_at, [index]), align=4))
        new_sums.append(
            [builder.call(fma, [scalar, columns[n], sums[row][n]]) for n in range(num_vectors)]
        )
        for phi, first, new in zip(sums[row], begun[row], new_sums[row], strict=True):
            phi.add_incoming(first, start)
            phi.add_incoming(new, loop)
    next_index = builder.add(index, INT64(1))
    index.add_incoming(next_index, loop)
    keep_rolled(builder, builder.cbranch(builder.icmp_signed("<", next_index, depth), loop, end))
    builder.position_at_end(end)
    return new_sums


def _emit_tile(
    builder: Any, num_rows: int, num_vectors: int, a: Any, a_stride: Any, b: Any, b_stride: Any,
    depth: Any, c: Any, c_stride: Any, is_added: Any,
) -> None:  # fmt: skip
    """Emit the product for exactly `num_rows` rows and `num_vectors` vectors of columns."""
    row_ats, pointers = [], []
    for row in range(num_rows):
        offset = INT64(_FLOAT_BYTES * row)
        a_row = builder.add(a, builder.mul(a_stride, offset))
        row_ats.append(builder.inttoptr(a_row, FLOAT.as_pointer()))
        c_row = builder.add(c, builder.mul(c_stride, offset))
        pointers.append(
            [
                vector_at(builder, builder.add(c_row, INT64(_FLOAT_BYTES * LANES * n)))
                for n in range(num_vectors)
            ]
        )
    start = builder.block
    load = builder.append_basic_block("load")
    begin = builder.append_basic_block("begin")
    builder.cbranch(builder.icmp_signed("!=", is_added, INT64(0)), load, begin)
    builder.position_at_end(load)
    loaded = [[builder.load(pointer, align=4) for pointer in of_row] for of_row in pointers]
    builder.branch(begin)
    builder.position_at_end(begin)
    begun = []
    for values in loaded:
        phis = [builder.phi(VECTOR) for _ in values]
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(constant(0.0), start)
            phi.add_incoming(value, load)
        begun.append(phis)
    b_bytes = builder.mul(b_stride, INT64(_FLOAT_BYTES))
    sums = _emit_loop(builder, row_ats, b, b_bytes, depth, begun)
    for row_pointers, row_sums in zip(pointers, sums, strict=True):
        for pointer, total in zip(row_pointers, row_sums, strict=True):
            builder.store(total, pointer, align=4)


def _own_function(module: Any, num_rows: int, num_vectors: int) -> Any:
    """Return the product for exactly these numbers as a function that is never inlined."""
    name = f"tile_of_{num_rows}_rows_{num_vectors}_vectors"
    if name in module.globals:  # the widest tile is the narrowest one, on a narrow processor
        return module.get_global(name)
    kind = ir.FunctionType(ir.VoidType(), [INT64] * 8)
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _emit_tile(builder, num_rows, num_vectors, *function.args)
    builder.ret_void()
    return function


def tile_products(num_vectors: int) -> Any:
    """Return the product for this many vectors of columns and up to `MAX_TILE_ROWS` rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        done = builder.append_basic_block("done")
        cases = [builder.append_basic_block(f"rows_{n}") for n in range(1, MAX_TILE_ROWS + 1)]
        switch = builder.switch(args[0], cases[0])
        for num_rows, case in enumerate(cases, 1):
            if num_rows > 1:
                switch.add_case(INT64(num_rows), case)
            builder.position_at_end(case)
            builder.call(_own_function(builder.module, num_rows, num_vectors), args[1:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    @intrinsic
    def tiles(
        typing: Any, rows: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, depth: Any, c: Any,
        c_stride: Any, is_added: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 9), codegen

    return tiles


tile_product = tile_products(1)
"""Compute `c[r, 0:16] (+)= Σ_k a[r, k] · b[k, 0:16]` for `rows` ≤ `MAX_TILE_ROWS`, `depth` ≥ 1.

With `is_added` the chains start from the values in `c`, else from zero.
"""
wide_tile_product = tile_products(MAX_TILE_VECTORS)
"""The same for `16 · MAX_TILE_VECTORS` columns."""
