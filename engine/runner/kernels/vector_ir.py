"""Emit LLVM's own vectors, where its optimiser is not relied on to find them.

A `<16 x float>` is one AVX-512 register, two AVX2 or four NEON registers; the compiler splits it,
and the arithmetic per element stays the same. Kernels built on this take addresses in bytes and
strides in elements (int64): numba's arrays would add bounds and counts to the inner loops.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Columns of one panel of packed weights, and floats of one vector."""

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
INT_VECTOR = ir.VectorType(INT32, LANES)
_READ, _INTO_ALL_CACHES, _DATA = 0, 3, 1
"""Arguments of the prefetch instruction."""


def vector_at(builder: Any, address: Any, vector: Any = VECTOR) -> Any:
    """Return a pointer to the vector at `address`."""
    return builder.inttoptr(address, vector.as_pointer())


def constant(value: float) -> Any:
    """Return a vector with `value` in every lane."""
    return ir.Constant(VECTOR, [value] * LANES)


def int_constant(value: int) -> Any:
    """Return a vector with the integer `value` in every lane."""
    return ir.Constant(INT_VECTOR, [value] * LANES)


def splat(builder: Any, scalar: Any) -> Any:
    """Return a vector with a number known only at run time in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    single = builder.insert_element(undefined, scalar, INT32(0))
    return builder.shuffle_vector(single, undefined, ir.Constant(INT_VECTOR, [0] * LANES))


def declare_fma(builder: Any) -> Any:
    """Return the fused multiply-add of three vectors, rounded once."""
    signature = ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR])
    return cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32")


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at `address`, which may be outside of all memory."""
    pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    at = builder.inttoptr(address, pointer)
    builder.call(function, [at, INT32(_READ), INT32(_INTO_ALL_CACHES), INT32(_DATA)])


@intrinsic
def prefetch_line(typing: Any, address: Any) -> Any:
    """Prefetch the cache line at `address`, which may be outside of all memory."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def keep_loads_behind(builder: Any) -> None:
    """Emit no instruction, but keep the compiler from moving later loads to before this point.

    Its scheduler likes to load a loop's operands all at once. With an accumulator in nearly every
    register there is no room for them, and each turn would store accumulators and load them again.
    """
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def keep_rolled(builder: Any, branch: Any) -> None:
    """Keep the compiler from unrolling the loop that ends with `branch`."""
    module = builder.module
    option = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    branch.set_metadata("llvm.loop", module.add_metadata([option]))


def emit_loop(builder: Any, count: Any, begun: list[Any], body: Any) -> list[Any]:
    """Emit `for index in range(count): state = body(index, state)`; return the state."""
    start = builder.block
    loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    phis = [builder.phi(value.type) for value in begun]
    state = body(index, phis)
    following = builder.add(index, INT64(1))
    index.add_incoming(INT64(0), start)
    index.add_incoming(following, builder.block)
    for phi, first, new in zip(phis, begun, state, strict=True):
        phi.add_incoming(first, start)
        phi.add_incoming(new, builder.block)
    branch = builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
    keep_rolled(builder, branch)
    builder.position_at_end(end)
    return state


def over_vectors(builder: Any, address: Any, num_vectors: Any, first: Any, combine: Any) -> Any:
    """Emit `state = combine(builder, vector, state)` over adjacent vectors; return the state."""
    start = builder.block
    loop = builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, state = builder.phi(INT64), builder.phi(VECTOR)
    index.add_incoming(INT64(0), start)
    state.add_incoming(first, start)
    offset = builder.mul(index, INT64(4 * LANES))
    x = builder.load(vector_at(builder, builder.add(address, offset)), align=4)
    new_state = combine(builder, x, state)
    state.add_incoming(new_state, loop)
    next_index = builder.add(index, INT64(1))
    index.add_incoming(next_index, loop)
    builder.cbranch(builder.icmp_signed("<", next_index, num_vectors), loop, end)
    builder.position_at_end(end)
    return new_state


def fold(builder: Any, vector: Any, combine: Any) -> Any:
    """Combine the lanes pairwise, halves first, down to one float."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(INT32, lanes), list(half))
            )
            for half in (range(lanes), range(lanes, 2 * lanes))
        )
        vector = combine(builder, high, low)
    return builder.extract_element(vector, INT32(0))
