"""Weights of every stored format, packed for the kernels, and what products must be."""

from __future__ import annotations

import math

import numpy as np

from engine.runner.kernels.products.packed import (
    PackedWeight,
    pack_into,
    packed_bytes,
    packed_view,
)
from engine.runner.weights.stored_tensor import GROUP_SIZES, GroupedTensor, row_bytes

NONE = np.zeros(0, np.float32)
NONE_2D = np.zeros((0, 0), np.float32)
GROUPED_FORMATS = [name for name, (values, _) in GROUP_SIZES.items() if values > 1]
_HALVES_AT = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
"""Where a group has its float16 numbers, if not just in front."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def floats(weight: np.ndarray) -> GroupedTensor:
    rows = np.ascontiguousarray(weight, np.float32)
    return GroupedTensor("F32", (len(rows), rows.shape[1]), rows.view(np.uint8))


def stored(
    name: str, num_outputs: int, num_inputs: int, seed: int = 0, scale: float = 0.01
) -> GroupedTensor:
    """Any bits in the numbers of a group, and scales of about `scale`, negative ones too."""
    if name not in GROUPED_FORMATS:
        values = normal(num_outputs, num_inputs, seed=seed)
        if name == "F16":
            rows = values.astype(np.float16).view(np.uint8)
        else:
            rows = values.view(np.uint8)
            if name == "BF16":
                rows = np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))
                rows = rows.view(np.uint8)
        return GroupedTensor(name, (num_outputs, num_inputs), rows)
    random = np.random.RandomState(seed)
    shape = num_outputs, row_bytes(name, num_inputs)
    rows = random.randint(0, 256, shape).astype(np.uint8)
    groups = rows.reshape(num_outputs, -1, GROUP_SIZES[name][1])
    if name == "MXFP4":
        nearest = 128 + round(math.log2(scale))
        groups[..., 0] = random.randint(nearest - 2, nearest + 2, groups.shape[:2])
        return GroupedTensor(name, (num_outputs, num_inputs), rows)
    for at in _HALVES_AT.get(name, (0,)):
        scales = random.standard_normal((*groups.shape[:2], 1)) * scale
        groups[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return GroupedTensor(name, (num_outputs, num_inputs), rows)


def aligned(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


_kept: list[PackedWeight] = []


def packed(
    *tensors: GroupedTensor, with_bytes: bool = False, is_fine: bool = False
) -> PackedWeight:
    """Pack tensors side by side, in memory that is kept: a table has its address alone."""
    described = [(tensor.format, tensor.shape) for tensor in tensors]
    data = aligned(packed_bytes(described))
    pack_into(tensors, data)
    _kept.append(packed_view(described, data, with_bytes=with_bytes, is_fine=is_fine))
    return _kept[-1]


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The fused multiply-add of float32, rounded once.

    The product is exact in float64. Their sum is rounded to odd there, so that rounding it again,
    to float32, gives what rounding the exact sum once would.
    """
    product, added = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + added
    back = total - product
    error = (product - (total - back)) + (added - back)
    bits = total.view(np.int64)
    up = (error > 0) == (total > 0)
    is_even = (bits & 1) == 0
    bits = np.where((error != 0) & is_even, bits + np.where(up, 1, -1), bits)
    return np.asarray(bits.view(np.float64), np.float32)


def chained(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`x · weightᵀ`, every element one chain of fused multiply-adds in the order of the inputs."""
    out = np.zeros((len(x), len(weight)), np.float32)
    for k in range(x.shape[1]):
        out = fma(x[:, k : k + 1], weight[None, :, k], out)
    return out
