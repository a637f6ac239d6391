"""The few operations that are written in LLVM's own vectors instead of left to its optimiser.

A `<16 x float>` is one AVX-512 register, two AVX2 or four NEON registers; the compiler splits it,
and the arithmetic per element stays the same. Arguments are addresses in bytes and strides in
elements (int64): numba's arrays would bring bounds and reference counts into the inner loops.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Columns of one panel of packed weights, and floats of one vector."""
MAX_TILE_ROWS = 6
"""Rows of the largest tile: its twelve AVX2 accumulators leave registers for the operands."""

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_HALF = ir.VectorType(_FLOAT, 8)
_ZEROS = ir.Constant(_VECTOR, [0.0] * LANES)
_MINUS_INFINITIES = ir.Constant(_VECTOR, [float("-inf")] * LANES)


def _vector_at(builder: Any, address: Any, vector: Any = _VECTOR) -> Any:
    return builder.inttoptr(address, vector.as_pointer())


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(_INT32, 0))
    first = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(single, undefined, first)


def _fused_multiply_add(builder: Any) -> Any:
    signature = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    return cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32")


def _tile_rows(num_rows: int) -> Any:
    """The tile product for exactly `num_rows` rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_stride, b, b_stride, depth, c, c_stride, is_added = args
        fma = _fused_multiply_add(builder)
        rows_a, rows_c = [], []
        for row in range(num_rows):
            offset = ir.Constant(_INT64, 4 * row)
            a_row = builder.add(a, builder.mul(a_stride, offset))
            rows_a.append(builder.inttoptr(a_row, _FLOAT.as_pointer()))
            rows_c.append(_vector_at(builder, builder.add(c, builder.mul(c_stride, offset))))
        base_b = builder.inttoptr(b, _FLOAT.as_pointer())

        start = builder.block
        load = builder.append_basic_block("load")
        begin = builder.append_basic_block("begin")
        loop = builder.append_basic_block("loop")
        end = builder.append_basic_block("end")
        builder.cbranch(builder.icmp_signed("!=", is_added, _INT64(0)), load, begin)
        builder.position_at_end(load)
        loaded = [builder.load(row, align=4) for row in rows_c]
        builder.branch(begin)
        builder.position_at_end(begin)
        first = []
        for row in range(num_rows):
            phi = builder.phi(_VECTOR)
            phi.add_incoming(_ZEROS, start)
            phi.add_incoming(loaded[row], load)
            first.append(phi)
        builder.branch(loop)

        builder.position_at_end(loop)
        index = builder.phi(_INT64)
        index.add_incoming(_INT64(0), begin)
        sums = [builder.phi(_VECTOR) for _ in range(num_rows)]
        b_row = builder.gep(base_b, [builder.mul(index, b_stride)])
        b_vector = builder.load(builder.bitcast(b_row, _VECTOR.as_pointer()), align=4)
        new_sums = []
        for row in range(num_rows):
            sums[row].add_incoming(first[row], begin)
            scalar = builder.load(builder.gep(rows_a[row], [index]), align=4)
            new_sums.append(builder.call(fma, [_splat(builder, scalar), b_vector, sums[row]]))
        for row in range(num_rows):
            sums[row].add_incoming(new_sums[row], loop)
        next_index = builder.add(index, _INT64(1))
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


@njit(nogil=True, cache=True)
def tile_product(
    rows: int, a: int, a_stride: int, b: int, b_stride: int, depth: int, c: int, c_stride: int,
    is_added: int,
) -> None:  # fmt: skip
    """`c[r, 0:16] (+)= Σ_k a[r, k] · b[k, 0:16]` for `rows` ≤ 6 rows and `depth` ≥ 1.

    With `is_added` the chains start from what `c` holds, else from zero. Each of the `rows × 16`
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


def _over_vectors(builder: Any, address: Any, num_vectors: Any, first: Any, combine: Any) -> Any:
    """Emit `state = combine(builder, vector, state)` over consecutive vectors; the last state."""
    start = builder.block
    loop = builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, state = builder.phi(_INT64), builder.phi(_VECTOR)
    index.add_incoming(_INT64(0), start)
    state.add_incoming(first, start)
    offset = builder.mul(index, _INT64(4 * LANES))
    x = builder.load(_vector_at(builder, builder.add(address, offset)), align=4)
    new_state = combine(builder, x, state)
    state.add_incoming(new_state, loop)
    next_index = builder.add(index, _INT64(1))
    index.add_incoming(next_index, loop)
    builder.cbranch(builder.icmp_signed("<", next_index, num_vectors), loop, end)
    builder.position_at_end(end)
    return new_state


def _fold(builder: Any, vector: Any, combine: Any) -> Any:
    """Combine the lanes pairwise, halves first, down to one float."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(_INT32, lanes), list(half))
            )
            for half in (range(lanes), range(lanes, 2 * lanes))
        )
        vector = combine(builder, high, low)
    return builder.extract_element(vector, _INT32(0))


def _sum(builder: Any, x: Any, total: Any) -> Any:
    return builder.fadd(total, x)


def _larger(builder: Any, x: Any, best: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, best), x, best)


@intrinsic
def sum_squares(typing: Any, address: Any, num_vectors: Any) -> Any:
    """Σ x² over `16 · num_vectors` floats: sixteen chains, then a tree of additions."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fma = _fused_multiply_add(builder)
        total = _over_vectors(
            builder, *args, _ZEROS, lambda b, x, sums: b.call(fma, [x, x, sums])
        )
        return _fold(builder, total, _sum)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def largest_of(typing: Any, address: Any, num_vectors: Any) -> Any:
    """The largest of `16 · num_vectors` floats, none of them NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        best = _over_vectors(builder, *args, _MINUS_INFINITIES, _larger)
        return _fold(builder, best, _larger)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def add_vectors(typing: Any, target: Any, address: Any, num_vectors: Any) -> Any:
    """Add `num_vectors` vectors of 16 floats to the vector at `target`, one after the other."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _vector_at(builder, args[0])
        first = builder.load(place, align=4)
        builder.store(_over_vectors(builder, *args[1:], first, _sum), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def transpose_8x8(typing: Any, source: Any, source_stride: Any, target: Any, stride: Any) -> Any:
    """`target[j, i] = source[i, j]` for an 8 × 8 block of floats; strides in elements."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, source_stride, target, stride = args
        rows = []
        for i in range(8):
            offset = builder.mul(source_stride, _INT64(4 * i))
            rows.append(builder.load(_vector_at(builder, builder.add(source, offset), _HALF), align=4))
        for width in (4, 2, 1):  # swap the off-diagonal halves, then quarters, then elements
            low = [i if i & width == 0 else 8 + i - width for i in range(8)]
            high = [i + width if i & width == 0 else 8 + i for i in range(8)]
            masks = [ir.Constant(ir.VectorType(_INT32, 8), mask) for mask in (low, high)]
            swapped = list(rows)
            for i in range(8):
                if i & width == 0:
                    pair = rows[i], rows[i + width]
                    swapped[i] = builder.shuffle_vector(*pair, masks[0])
                    swapped[i + width] = builder.shuffle_vector(*pair, masks[1])
            rows = swapped
        for j in range(8):
            offset = builder.mul(stride, _INT64(4 * j))
            builder.store(rows[j], _vector_at(builder, builder.add(target, offset), _HALF), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def float_from_bits(typing: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), codegen
