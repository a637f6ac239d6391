"""A token's key or value in the KV cache: what the cache stores, and how floats become it.

A *slot* holds one head's key or value of one token. Its bytes depend on that token's floats alone:

    float32     head_dim floats
    bfloat16    head_dim halves of floats, rounded to the nearest, ties to even
    int8        head_dim signed bytes, and after them their scale, a float

An int8 slot stands for `byte · scale`. The scale is the largest magnitude / 127, and a float
becomes the nearest byte, ties to even, of its product with 127 / magnitude. A slot whose largest
magnitude is below 2^-100 becomes zeros. One with an infinity or a NaN gets the scale NaN, so what
is broken stays visible. In either format, what is rounded up from the largest float is an infinity.

Kernels take the cache as bytes, `[num_blocks, kv_heads, block_size, slot_bytes]`, and recognise the
format by `item_bytes`. So one compilation serves all formats. `engine.runner.cache.kv_formats` has
the same functions in numpy and in Paddle.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT32,
    INT64,
    INT_VECTOR,
    LANES,
    constant,
    fold,
    over_vectors,
    splat,
    vector_at,
)
from engine.runner.kernels.vector_math import ROUNDER, emit_transpose

FLOATS, HALVES, BYTES = 4, 2, 1
"""Bytes of a stored number: the formats, as `item_bytes` returns them."""
_BYTE = ir.IntType(8)
_HALF = ir.IntType(16)
_LARGEST = ir.Constant(FLOAT, 127.0)
_LEAST_BITS = INT32((127 - 100) << 23)  # of 2^-100
_INFINITY_BITS = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_ALIGNMENT = 4


@njit(nogil=True, cache=True, error_model="numpy")
def item_bytes(slot_bytes: int, head_dim: int) -> int:
    """Return the bytes of a stored number, where a head has more than four."""
    return slot_bytes // head_dim


@njit(nogil=True, cache=True, error_model="numpy")
def slot_at(cache, block, head, offset) -> int:  # type: ignore[no-untyped-def]
    """Return the address of a slot in a layer's keys or values."""
    strides = cache.strides
    distance = block * strides[0] + head * strides[1] + offset * strides[2]
    return cache.ctypes.data + distance


def _ints(value: int, lanes: int = LANES) -> Any:
    return ir.Constant(ir.VectorType(INT32, lanes), [value] * lanes)


def _larger_magnitude(builder: Any, x: Any, best: Any) -> Any:
    """Compare as integers: a NaN is larger than an infinity, and that than any other float."""
    lanes = x.type.count
    bits, best_bits = (builder.bitcast(v, ir.VectorType(INT32, lanes)) for v in (x, best))
    bits = builder.and_(bits, _ints(_MAGNITUDE, lanes))
    larger = builder.select(builder.icmp_unsigned(">", bits, best_bits), bits, best_bits)
    return builder.bitcast(larger, ir.VectorType(FLOAT, lanes))


def _scales(builder: Any, magnitude: Any) -> tuple[Any, Any, Any]:
    """Return a slot's scale, the factor of its floats, and whether a float is not finite."""
    bits = builder.bitcast(magnitude, INT32)
    is_broken = builder.icmp_unsigned(">=", bits, INT32(_INFINITY_BITS))
    is_zero = builder.icmp_unsigned("<", bits, _LEAST_BITS)
    zero, nan = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, float("nan"))
    scale = builder.select(is_zero, zero, builder.fdiv(magnitude, _LARGEST))
    factor = builder.select(is_zero, zero, builder.fdiv(_LARGEST, magnitude))
    return builder.select(is_broken, nan, scale), factor, is_broken


@intrinsic
def _store_bytes(typing: Any, source: Any, target: Any, num_vectors: Any) -> Any:
    """Round the floats at `source` to bytes at `target`, and put their scale after them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target, num_vectors = args
        best = over_vectors(builder, source, num_vectors, constant(0.0), _larger_magnitude)
        scale, factor, is_broken = _scales(builder, fold(builder, best, _larger_magnitude))
        factors, count = splat(builder, factor), builder.mul(num_vectors, INT64(LANES))
        scale_at = builder.inttoptr(builder.add(target, count), FLOAT.as_pointer())
        builder.store(scale, scale_at, align=_ALIGNMENT)

        def store(builder: Any, x: Any, at: Any) -> Any:
            # The low byte of a float's bits is the rounded number when 1.5 · 2^23 is added.
            shifted = builder.fadd(builder.fmul(x, factors), ROUNDER)
            numbers = builder.trunc(builder.bitcast(shifted, INT_VECTOR), _vector(_BYTE))
            numbers = builder.select(is_broken, ir.Constant(_vector(_BYTE), None), numbers)
            pointer = vector_at(builder, at, _vector(_BYTE))
            builder.store(numbers, pointer, align=_ALIGNMENT)
            return builder.add(at, INT64(LANES))

        _for_vectors(builder, source, num_vectors, target, store)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def _store_halves(typing: Any, source: Any, target: Any, num_vectors: Any) -> Any:
    """Round the floats at `source` to bfloat16 at `target`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target, num_vectors = args

        def store(builder: Any, x: Any, at: Any) -> Any:
            bits = builder.bitcast(x, INT_VECTOR)
            is_odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
            rounded = builder.add(bits, builder.add(is_odd, _ints(0x7FFF)))
            magnitude = builder.and_(bits, _ints(_MAGNITUDE))
            is_nan = builder.icmp_unsigned(">", magnitude, _ints(_INFINITY_BITS))
            rounded = builder.select(is_nan, _ints(0x7FC00000), rounded)
            halves = builder.trunc(builder.lshr(rounded, _ints(16)), _vector(_HALF))
            builder.store(halves, vector_at(builder, at, _vector(_HALF)), align=_ALIGNMENT)
            return builder.add(at, INT64(HALVES * LANES))

        _for_vectors(builder, source, num_vectors, target, store)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def _copy_floats(typing: Any, source: Any, target: Any, num_vectors: Any) -> Any:
    """Copy the floats at `source` to `target`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target, num_vectors = args

        def store(builder: Any, x: Any, at: Any) -> Any:
            builder.store(x, vector_at(builder, at), align=_ALIGNMENT)
            return builder.add(at, INT64(FLOATS * LANES))

        _for_vectors(builder, source, num_vectors, target, store)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


def _vector(item: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(item, lanes)


def _for_vectors(builder: Any, source: Any, num_vectors: Any, target: Any, store: Any) -> None:
    """Emit `target = store(builder, vector, target)` for the adjacent vectors at `source`."""
    start = builder.block
    loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, at = builder.phi(INT64), builder.phi(INT64)
    index.add_incoming(INT64(0), start)
    at.add_incoming(target, start)
    pointer = builder.add(source, builder.mul(index, INT64(FLOATS * LANES)))
    next_at = store(builder, builder.load(vector_at(builder, pointer), align=_ALIGNMENT), at)
    next_index = builder.add(index, INT64(1))
    index.add_incoming(next_index, loop)
    at.add_incoming(next_at, loop)
    builder.cbranch(builder.icmp_signed("<", next_index, num_vectors), loop, end)
    builder.position_at_end(end)


def _load_halves(builder: Any, address: Any, lanes: int) -> Any:
    stored = vector_at(builder, address, _vector(_HALF, lanes))
    bits = builder.zext(builder.load(stored, align=_ALIGNMENT), _vector(INT32, lanes))
    return builder.bitcast(builder.shl(bits, _ints(16, lanes)), _vector(FLOAT, lanes))


def _load_bytes(builder: Any, address: Any, scale: Any, lanes: int) -> Any:
    stored = vector_at(builder, address, _vector(_BYTE, lanes))
    numbers = builder.sext(builder.load(stored, align=_ALIGNMENT), _vector(INT32, lanes))
    undefined = ir.Constant(_vector(FLOAT, lanes), ir.Undefined)
    single = builder.insert_element(undefined, scale, INT32(0))
    scales = builder.shuffle_vector(single, undefined, _ints(0, lanes))
    return builder.fmul(builder.sitofp(numbers, _vector(FLOAT, lanes)), scales)


@intrinsic
def _widen_halves(typing: Any, slot: Any, target: Any, num_vectors: Any) -> Any:
    """Write a slot of bfloat16 as floats to `target`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def load(builder: Any, index: Any) -> Any:
            offset = builder.mul(index, INT64(HALVES * LANES))
            return _load_halves(builder, builder.add(args[0], offset), LANES)

        _widen(builder, args[1], args[2], load)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def _widen_bytes(typing: Any, slot: Any, target: Any, num_vectors: Any) -> Any:
    """Write a slot of bytes with their scale as floats to `target`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scale_at = builder.add(args[0], builder.mul(args[2], INT64(LANES)))
        scale = _load_scale(builder, scale_at)

        def load(builder: Any, index: Any) -> Any:
            offset = builder.mul(index, INT64(LANES))
            return _load_bytes(builder, builder.add(args[0], offset), scale, LANES)

        _widen(builder, args[1], args[2], load)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


def _load_scale(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, FLOAT.as_pointer()), align=_ALIGNMENT)


def _widen(builder: Any, target: Any, num_vectors: Any, load: Any) -> None:
    """Emit `target[index] = load(builder, index)` for all vectors."""
    start = builder.block
    loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    index.add_incoming(INT64(0), start)
    pointer = builder.add(target, builder.mul(index, INT64(FLOATS * LANES)))
    builder.store(load(builder, index), vector_at(builder, pointer), align=_ALIGNMENT)
    next_index = builder.add(index, INT64(1))
    index.add_incoming(next_index, loop)
    builder.cbranch(builder.icmp_signed("<", next_index, num_vectors), loop, end)
    builder.position_at_end(end)


@intrinsic
def transpose_halves(typing: Any, source: Any, slot_bytes: Any, target: Any, stride: Any) -> Any:
    """Set `target[j, i] = source[i, j]` for 8 × 8 numbers of 8 adjacent slots of bfloat16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, slot_bytes, target, stride = args
        pointers = [builder.add(source, builder.mul(slot_bytes, INT64(i))) for i in range(8)]
        rows = [_load_halves(builder, pointer, 8) for pointer in pointers]
        emit_transpose(builder, rows, target, stride)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def transpose_bytes(
    typing: Any, source: Any, scales: Any, slot_bytes: Any, target: Any, stride: Any
) -> Any:
    """Do the same for slots of bytes; `scales` is the address of the first slot's scale."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, scales, slot_bytes, target, stride = args
        rows = []
        for i in range(8):
            offset = builder.mul(slot_bytes, INT64(i))
            scale = _load_scale(builder, builder.add(scales, offset))
            rows.append(_load_bytes(builder, builder.add(source, offset), scale, 8))
        emit_transpose(builder, rows, target, stride)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@njit(nogil=True, cache=True, error_model="numpy")
def store_slot(source: int, slot: int, head_dim: int, kind: int) -> None:
    """Write `head_dim` floats at `source` into the slot at an address; `kind` is `item_bytes`."""
    num_vectors = head_dim // LANES
    if kind == FLOATS:
        _copy_floats(source, slot, num_vectors)
    elif kind == HALVES:
        _store_halves(source, slot, num_vectors)
    else:
        _store_bytes(source, slot, num_vectors)


@njit(nogil=True, cache=True, error_model="numpy")
def widen_slot(slot: int, target: int, head_dim: int, kind: int) -> None:
    """Write what the slot at an address stands for to `head_dim` floats at `target`."""
    num_vectors = head_dim // LANES
    if kind == FLOATS:
        _copy_floats(slot, target, num_vectors)
    elif kind == HALVES:
        _widen_halves(slot, target, num_vectors)
    else:
        _widen_bytes(slot, target, num_vectors)
