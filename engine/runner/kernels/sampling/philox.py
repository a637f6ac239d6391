"""Philox4x32-10, the counter-based generator of the noise of every token draw.

From Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC11): a block of
four 32-bit words is a pure function of a 128-bit counter and a 64-bit key. There is no state to
store or move, so a request that continues on another node continues with the same noise.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types, uint32
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import INT32, INT64, vector_at

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_NUM_ROUNDS = 10
_LANES = 8
_WORDS = ir.VectorType(INT32, _LANES)
_PRODUCTS = ir.VectorType(INT64, _LANES)


def _constant(value: int) -> Any:
    return ir.Constant(_PRODUCTS, [value] * _LANES)


def _in_every_lane(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_PRODUCTS, ir.Undefined)
    single = builder.insert_element(undefined, number, INT32(0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_WORDS, [0] * _LANES))


def _emit_rounds(builder: Any, words: list[Any], keys: list[tuple[Any, Any]]) -> list[Any]:
    """Emit the rounds of eight blocks; a word is the low half of a 64-bit lane.

    The high halves may hold anything: a product reads low halves alone, in one instruction.
    """
    low_half, half = _constant(0xFFFFFFFF), _constant(32)
    for k0, k1 in keys:
        product_0 = builder.mul(builder.and_(words[0], low_half), _constant(_MULTIPLIER_0))
        product_1 = builder.mul(builder.and_(words[2], low_half), _constant(_MULTIPLIER_1))
        words = [
            builder.xor(builder.xor(builder.lshr(product_1, half), words[1]), k0),
            product_1,
            builder.xor(builder.xor(builder.lshr(product_0, half), words[3]), k1),
            product_0,
        ]
    return words


def _round_keys(builder: Any, key: Any) -> list[tuple[Any, Any]]:
    """Emit the keys of all rounds, in every lane."""
    keys = []
    for number in range(_NUM_ROUNDS):
        halves = []
        for half, step in ((key, _WEYL_0), (builder.lshr(key, INT64(32)), _WEYL_1)):
            own = builder.add(half, INT64(number * step))
            halves.append(_in_every_lane(builder, own))
        keys.append((halves[0], halves[1]))
    return keys


@intrinsic
def _write_blocks(typing: Any, words: Any, stride: Any, num_vectors: Any, second: Any, key: Any):  # type: ignore[no-untyped-def]
    """Fill four rows of `8 · num_vectors` words, `stride` bytes apart, with Philox blocks.

    The counters are (first row, `second`, 0, 0). `num_vectors` is at least 1.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at, stride, num_vectors, second, key = args
        keys = _round_keys(builder, key)
        second = _in_every_lane(builder, builder.zext(second, INT64))
        start = builder.block
        loop = builder.append_basic_block("loop")
        end = builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(INT64)
        index.add_incoming(INT64(0), start)
        pointer = builder.add(at, builder.mul(index, INT64(4 * _LANES)))
        counters = builder.load(vector_at(builder, pointer, _WORDS), align=4)
        counters = builder.zext(counters, _PRODUCTS)
        none = _constant(0)
        for word in _emit_rounds(builder, [counters, second, none, none], keys):
            builder.store(builder.trunc(word, _WORDS), vector_at(builder, pointer, _WORDS), align=4)
            pointer = builder.add(pointer, stride)
        following = builder.add(index, INT64(1))
        index.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_vectors), loop, end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.uint32, types.uint64), codegen


@intrinsic
def largest_word(typing: Any, first: Any, num_blocks: Any, second: Any, key: Any):  # type: ignore[no-untyped-def]
    """Return the largest word of the blocks of successive counters (first + j, `second`, 0, 0).

    `num_blocks` is a multiple of 8, and at least 8. Nothing is written to memory.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, num_blocks, second, key = args
        keys = _round_keys(builder, key)
        second = _in_every_lane(builder, builder.zext(second, INT64))
        counters = builder.add(
            _in_every_lane(builder, builder.zext(first, INT64)),
            ir.Constant(_PRODUCTS, list(range(_LANES))),
        )
        halves = ir.VectorType(INT32, 2 * _LANES)
        start = builder.block
        loop = builder.append_basic_block("loop")
        end = builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        index, own, most = builder.phi(INT64), builder.phi(_PRODUCTS), builder.phi(halves)
        index.add_incoming(INT64(0), start)
        own.add_incoming(counters, start)
        most.add_incoming(ir.Constant(halves, [0] * 2 * _LANES), start)
        larger = most
        for word in _emit_rounds(builder, [own, second, _constant(0), _constant(0)], keys):
            word = builder.bitcast(word, halves)
            larger = builder.select(builder.icmp_unsigned(">", word, larger), word, larger)
        following = builder.add(index, INT64(_LANES))
        index.add_incoming(following, loop)
        own.add_incoming(builder.add(own, _constant(_LANES)), loop)
        most.add_incoming(larger, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_blocks), loop, end)
        builder.position_at_end(end)
        # A word is the low half of a lane; the high halves hold anything.
        words = builder.trunc(builder.bitcast(larger, _PRODUCTS), _WORDS)
        largest = INT32(0)
        for lane in range(_LANES):
            word = builder.extract_element(words, INT32(lane))
            largest = builder.select(builder.icmp_unsigned(">", word, largest), word, largest)
        return largest

    return types.uint32(types.uint32, types.int64, types.uint32, types.uint64), codegen


@numba.njit("void(uint32[:, ::1], uint32, uint64)", nogil=True, cache=True)
def philox_at(words: np.ndarray, second: int, key: int) -> None:
    """Fill `words` ([4, n] uint32) with the blocks of counters (words[0, j], second, 0, 0)."""
    num = words.shape[1]
    num_vectors = num // _LANES
    if num_vectors:
        _write_blocks(words.ctypes.data, 4 * num, num_vectors, second, key)
    rest = num - num_vectors * _LANES
    if rest:
        last = np.zeros((4, _LANES), np.uint32)
        # Loops: numba compiles an assignment of slices with the text of its error, for seconds.
        for j in range(rest):
            last[0, j] = words[0, num - rest + j]
        _write_blocks(last.ctypes.data, 4 * _LANES, 1, second, key)
        for word in range(4):
            for j in range(rest):
                words[word, num - rest + j] = last[word, j]


@numba.njit("void(uint32[:, ::1], uint32, uint32, uint64)", nogil=True, cache=True)
def philox_blocks(words: np.ndarray, first: int, second: int, key: int) -> None:
    """Fill `words` ([4, n] uint32) with the blocks of n successive counters.

    Column j is the block of key `key` (low word first) and counter (first + j, second, 0, 0).
    """
    for j in range(words.shape[1]):
        words[0, j] = uint32(first + uint32(j))
    philox_at(words, second, key)
