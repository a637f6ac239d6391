"""The values of stored weights in float32, and float32 weights as stored groups.

`dequantise` is the reference for the kernels. Each product and each sum is rounded by itself, as in
llama.cpp's Python package `gguf`, whose values these are bit for bit. `quantise` is the same
package's, too: an exact tie rounds away from zero.

A group of 32 values (Q4_0 to Q8_0) has a float16 scale `d`, and a float16 minimum `m` where the
name ends in 1. A group of 256 (the K formats) has scales of its parts in few bits. MXFP4, the
format of the OCP's specification of microscaling, has a power of two as its scale, in a byte (e8m0:
2 to the byte less 127, and 255 is NaN), and 32 numbers of 4 bits (e2m1).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.runner.weights.stored_tensor import GROUP_SIZES, GroupedTensor

Floats = np.ndarray
"""float32."""
Bytes = np.ndarray
"""uint8."""

_PART_BYTES = 4 << 20
"""Bytes of stored rows that are widened at a time: temporary arrays stay small."""


def dequantise(tensor: GroupedTensor) -> Floats:
    """Return the values of `tensor` as a new float32 array `[outputs, inputs]`."""
    num_outputs, num_inputs = tensor.shape
    values = np.empty((num_outputs, num_inputs), np.float32)
    step = max(1, _PART_BYTES // max(1, tensor.rows.shape[1]))
    for first in range(0, num_outputs, step):
        rows = tensor.rows[first : first + step]
        values[first : first + step] = _widened(tensor.format, rows).reshape(len(rows), -1)
    return values


def quantise(values: Floats, format_name: str) -> GroupedTensor:
    """Return `values` `[outputs, inputs]` in groups of `format_name`, a key of `QUANTISERS`.

    `inputs` is a multiple of 32.
    """
    num_outputs, num_inputs = values.shape
    groups = np.ascontiguousarray(values, np.float32).reshape(-1, 32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        rows = QUANTISERS[format_name](groups).reshape(num_outputs, -1)
    return GroupedTensor(format_name, (num_outputs, num_inputs), np.ascontiguousarray(rows))


def _widened(format_name: str, rows: Bytes) -> Floats:
    if format_name == "F32":
        return np.ascontiguousarray(rows).view(np.float32)
    if format_name == "F16":
        return np.ascontiguousarray(rows).view(np.float16).astype(np.float32)
    if format_name == "BF16":
        return (np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    groups = np.ascontiguousarray(rows).reshape(-1, GROUP_SIZES[format_name][1])
    # A scale that is not finite gives values that are not: the sampler reports such logits.
    with np.errstate(over="ignore", invalid="ignore"):
        return _DEQUANTISERS[format_name](groups)


def _half(groups: Bytes, at: int) -> Floats:
    """Return the float16 at this byte of every group as float32 `[groups, 1]`."""
    return np.ascontiguousarray(groups[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return low nibbles, then high ones, of each group: `[groups, 2 · bytes]`."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(groups: Bytes, at: int) -> Bytes:
    """Return 16 where a value's bit in the four bytes at `at` is set, `[groups, 32]`."""
    bits: Bytes = np.unpackbits(groups[:, at : at + 4], axis=1, bitorder="little") << 4
    return bits


def _q4_0(groups: Bytes) -> Floats:
    steps = _nibbles(groups[:, 2:]).astype(np.int8) - np.int8(8)
    return _half(groups, 0) * steps.astype(np.float32)


def _q4_1(groups: Bytes) -> Floats:
    return _half(groups, 0) * _nibbles(groups[:, 4:]).astype(np.float32) + _half(groups, 2)


def _q5_0(groups: Bytes) -> Floats:
    steps = (_nibbles(groups[:, 6:]) | _fifth_bits(groups, 2)).astype(np.int8) - np.int8(16)
    return _half(groups, 0) * steps.astype(np.float32)


def _q5_1(groups: Bytes) -> Floats:
    steps = _nibbles(groups[:, 8:]) | _fifth_bits(groups, 4)
    return _half(groups, 0) * steps.astype(np.float32) + _half(groups, 2)


def _q8_0(groups: Bytes) -> Floats:
    steps = np.ascontiguousarray(groups[:, 2:]).view(np.int8)
    return steps.astype(np.float32) * _half(groups, 0)


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Return six-bit scales and minima of the eight parts, `[groups, 8]` each, from 12 bytes."""
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    late_scales = (rest & 15) | ((scales >> 2) & 0x30)
    late_minima = (rest >> 4) | ((minima >> 2) & 0x30)
    return (
        np.concatenate([scales & 63, late_scales], axis=1).astype(np.float32),
        np.concatenate([minima & 63, late_minima], axis=1).astype(np.float32),
    )


def _in_parts_of_32(groups: Bytes, steps: Bytes) -> Floats:
    """Return `d · scale · step - dmin · minimum` with `steps` `[groups, 8, 32]`."""
    scales, minima = _scales_and_minima(groups[:, 4:16])
    scale = (_half(groups, 0) * scales)[:, :, None]
    minimum = (_half(groups, 2) * minima)[:, :, None]
    return scale * steps.astype(np.float32) - minimum


def _nibbles_by_32(packed: Bytes) -> Bytes:
    """Return, of each 32 bytes, the low nibbles and then the high ones: `[groups, 8, 32]`."""
    pairs = packed.reshape(len(packed), 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(packed), 8, 32)


def _q4_k(groups: Bytes) -> Floats:
    return _in_parts_of_32(groups, _nibbles_by_32(groups[:, 16:]))


def _q5_k(groups: Bytes) -> Floats:
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (groups[:, None, 16:48] >> shifts) & 1
    return _in_parts_of_32(groups, _nibbles_by_32(groups[:, 48:]) | (high << 4))


def _q6_k(groups: Bytes) -> Floats:
    count = len(groups)
    pairs = groups[:, :128].reshape(count, 2, 1, 64)
    low = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(count, 8, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = ((groups[:, 128:192].reshape(count, 2, 1, 32) >> shifts) & 3).reshape(count, 8, 32)
    steps = (low | (high << 4)).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(groups[:, 192:208]).view(np.int8).astype(np.float32)
    scale = (_half(groups, 208) * scales)[:, :, None]
    return scale * steps.reshape(count, 16, 16).astype(np.float32)


_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255, dtype=np.int32) - 127), np.float32(np.nan))
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of scales and of numbers. As in `gguf`, no zero has a sign."""


def _mxfp4(groups: Bytes) -> Floats:
    return _E8M0[groups[:, :1]] * _E2M1[_nibbles(groups[:, 1:])]


_DEQUANTISERS: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def _inverse(scale: Floats) -> Floats:
    inverse: Floats = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return inverse


def _halves(values: Floats) -> Bytes:
    return values.astype(np.float16).view(np.uint8)


def _steps_of(values: Floats, largest_step: int) -> Bytes:
    steps: Bytes = np.trunc(values).astype(np.uint8).clip(0, largest_step)
    return steps


def _packed_nibbles(steps: Bytes) -> Bytes:
    packed: Bytes = (steps[:, :16] & 15) | (steps[:, 16:] << 4)
    return packed


def _fifth_bytes(steps: Bytes) -> Bytes:
    return np.packbits(steps >> 4, axis=1, bitorder="little")


def _about_zero(groups: Floats, half_range: int) -> tuple[Floats, Bytes]:
    """Return scales, and steps from 0, where the value furthest from 0 is the lowest step."""
    furthest = np.take_along_axis(groups, abs(groups).argmax(axis=1, keepdims=True), axis=1)
    scale = furthest / np.float32(-half_range)
    raised = groups * _inverse(scale) + np.float32(half_range + 0.5)
    return scale, _steps_of(raised, 2 * half_range - 1)


def _above_minimum(groups: Floats, largest_step: int) -> tuple[Floats, Floats, Bytes]:
    """Return scales, minima and steps above them."""
    minimum = groups.min(axis=1, keepdims=True)
    scale = (groups.max(axis=1, keepdims=True) - minimum) / np.float32(largest_step)
    steps = _steps_of((groups - minimum) * _inverse(scale) + np.float32(0.5), largest_step)
    return scale, minimum, steps


def _to_q4_0(groups: Floats) -> Bytes:
    scale, steps = _about_zero(groups, 8)
    return np.concatenate([_halves(scale), _packed_nibbles(steps)], axis=1)


def _to_q4_1(groups: Floats) -> Bytes:
    scale, minimum, steps = _above_minimum(groups, 15)
    return np.concatenate([_halves(scale), _halves(minimum), _packed_nibbles(steps)], axis=1)


def _to_q5_0(groups: Floats) -> Bytes:
    scale, steps = _about_zero(groups, 16)
    return np.concatenate([_halves(scale), _fifth_bytes(steps), _packed_nibbles(steps)], axis=1)


def _to_q5_1(groups: Floats) -> Bytes:
    scale, minimum, steps = _above_minimum(groups, 31)
    halves = [_halves(scale), _halves(minimum)]
    return np.concatenate([*halves, _fifth_bytes(steps), _packed_nibbles(steps)], axis=1)


def _to_q8_0(groups: Floats) -> Bytes:
    scale = abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    exact = groups * _inverse(scale)
    size = np.floor(abs(exact))
    size += np.floor(2 * (abs(exact) - size))
    steps = (np.sign(exact) * size).astype(np.int8)
    return np.concatenate([_halves(scale), steps.view(np.uint8)], axis=1)


QUANTISERS: dict[str, Callable[[Floats], Bytes]] = {
    "Q8_0": _to_q8_0,
    "Q5_1": _to_q5_1,
    "Q5_0": _to_q5_0,
    "Q4_1": _to_q4_1,
    "Q4_0": _to_q4_0,
}
