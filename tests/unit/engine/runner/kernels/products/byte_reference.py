"""Products of bytes as they must be."""

from __future__ import annotations

import numpy as np

from engine.runner.kernels.norms import quantise_rows
from engine.runner.weights.stored_formats import dequantise
from tests.support.models.packing import fma, stored


def in_int8(x: np.ndarray, *, is_fine: bool = False) -> np.ndarray:
    out = np.zeros((x.shape[0], x.shape[1] // 2), np.float32)
    quantise_rows(x, out, is_fine)
    return out


def wanted_product(
    name: str, x: np.ndarray, num_outputs: int, *, is_fine: bool = False
) -> np.ndarray:
    """What a product of these rows, in int8, must be with a weight of `stored`."""
    tensor = stored(name, num_outputs, x.shape[1])
    step, values = quantised_rows(x, is_fine)
    numbers, steps, minima = stored_numbers(name, dequantise(tensor), tensor.rows)
    offset = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "MXFP4": 16}.get(name, 0)
    if offset == 128:
        numbers = numbers + offset
    elif is_fine and offset:
        numbers, minima = numbers + offset, steps[..., 0] * np.float32(-offset)
    out = np.zeros((len(x), num_outputs), np.float32)
    for group in range(x.shape[1] // 32):
        products, scaled_sums = [], []
        for half in range(2):
            within = slice(16 * half, 16 * (half + 1))
            integers = values[:, group, within].astype(np.int64)
            products.append((integers @ numbers[:, group, within].T).astype(np.float32))
            scaled_sums.append(integers.sum(axis=1).astype(np.float32) * step[:, group, half])
        first, second = step[:, group, 0, None], step[:, group, 1, None]
        lost = np.zeros((len(x), 1), np.float32)
        if offset == 128:
            lost = np.add(*scaled_sums)[:, None] * np.float32(-offset)
        if steps.shape[2] == 2:
            out = fma(products[0] * first, steps[None, :, group, 0], out)
            out = fma(products[1] * second, steps[None, :, group, 1], out)
        elif is_fine:
            both = fma(products[1], second, fma(products[0], first, lost))
            out = fma(both, steps[None, :, group, 0], out)
        else:
            both = fma(products[0] + products[1], first, lost)
            out = fma(both, steps[None, :, group, 0], out)
        if minima is not None:
            out = fma(np.add(*scaled_sums)[:, None], minima[None, :, group], out)
    return out


def quantised_rows(x: np.ndarray, is_fine: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return steps `[rows, groups, 2]` and values `[rows, groups, 32]`."""
    halves = x.reshape(len(x), -1, 2, 16)
    largest = np.abs(halves).max(axis=3)
    if not is_fine:
        largest = np.repeat(largest.max(axis=2, keepdims=True), 2, axis=2)
    factor = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), 0)
    values = np.rint(halves * factor.astype(np.float32)[..., None]).astype(np.int8)
    return largest / np.float32(127), values.reshape(len(x), -1, 32)


def stored_numbers(
    name: str, weight: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return a weight's integers, steps `[outputs, groups, parts]`, and minima of groups."""
    outputs = len(weight)
    if name.endswith("K"):
        groups = rows.reshape(outputs, -1, {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[name])
        if name == "Q6_K":
            factor = np.ascontiguousarray(groups[..., 208:]).view(np.float16).astype(np.float32)
            parts = np.ascontiguousarray(groups[..., 192:208]).view(np.int8).astype(np.float32)
            steps, minima = (factor * parts).reshape(outputs, -1, 2), None
        else:
            factors = np.ascontiguousarray(groups[..., :4]).view(np.float16).astype(np.float32)
            sc = groups[..., 4:16].astype(np.int32)
            low, mid, high = sc[..., :4], sc[..., 4:8], sc[..., 8:]
            steps = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
            mins = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], -1)
            steps = (factors[..., :1] * steps.astype(np.float32)).reshape(outputs, -1, 1)
            minima = -(factors[..., 1:] * mins.astype(np.float32)).reshape(outputs, -1)
    elif name == "MXFP4":
        exponents = rows.reshape(outputs, -1, 17)[..., :1].astype(np.float32)
        steps, minima = np.exp2(exponents - 128), None
    else:
        size = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}[name]
        groups = rows.reshape(outputs, -1, size)
        steps = np.ascontiguousarray(groups[..., :2]).view(np.float16).astype(np.float32)
        minima = None
        if name.endswith("_1"):
            halves = np.ascontiguousarray(groups[..., 2:4]).view(np.float16)[..., 0]
            minima = halves.astype(np.float32)
    values = weight.reshape(outputs, -1, 32).astype(np.float64)
    values = values - (0 if minima is None else minima[..., None])
    spread = np.repeat(steps, 32 // steps.shape[2], axis=2)
    numbers = np.where(spread == 0, 0, np.rint(values / np.where(spread == 0, 1, spread)))
    return numbers.astype(np.int64), steps, minima
