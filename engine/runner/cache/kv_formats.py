"""What the KV cache stores of a float key or value, in numpy and in Paddle.

`kernels.kv_slots` describes the formats and has the same functions for the CPU kernels; all three
store the same bytes of the same floats.
"""

from __future__ import annotations

import numpy as np

from engine.runner.paddle_import import paddle

_LARGEST = np.float32(127.0)
_LEAST = np.float32(2.0**-100)
"""A slot whose largest magnitude is smaller becomes zeros: 127 / magnitude may be infinite."""
_ROUNDER = 12582912.0  # 1.5 · 2^23: adding it to a small float rounds that, ties to even
_SCALE_BYTES = 4


def stored_slots(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the slots of float32 `[…, head_dim]` as uint8 `[…, slot_bytes]`."""
    if dtype == "float32":
        return np.ascontiguousarray(values, np.float32).view(np.uint8)
    if dtype == "bfloat16":
        return _halves(np.ascontiguousarray(values, np.float32))
    magnitudes = np.abs(values).max(axis=-1, keepdims=True)  # NaN where one is NaN
    is_broken, is_zero = ~np.isfinite(magnitudes), magnitudes < _LEAST
    usable = np.where(is_broken | is_zero, np.float32(1.0), magnitudes)
    scales = np.where(is_zero, np.float32(0.0), usable / _LARGEST)
    scales = np.where(is_broken, np.float32(np.nan), scales)
    factors = np.where(is_zero, np.float32(0.0), _LARGEST / usable)
    numbers = np.rint(np.where(is_broken, np.float32(0.0), values) * factors).astype(np.int8)
    return np.concatenate([numbers.view(np.uint8), scales.view(np.uint8)], axis=-1)


def widened_slots(slots: np.ndarray, dtype: str) -> np.ndarray:
    """Return the float32 `[…, head_dim]` that uint8 slots `[…, slot_bytes]` stand for."""
    if dtype == "float32":
        return slots.view(np.float32)
    if dtype == "bfloat16":
        return (slots.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    scales = np.ascontiguousarray(slots[..., -_SCALE_BYTES:]).view(np.float32)
    with np.errstate(over="ignore"):  # a slot near the largest float, as `kv_slots` says
        return slots[..., :-_SCALE_BYTES].view(np.int8).astype(np.float32) * scales


def _halves(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).view(np.uint8)


def stored_items(values: paddle.Tensor, dtype: str) -> paddle.Tensor:
    """Return what the cache stores of `[…, head_dim]`, `[…, slot items]` of the cache's dtype."""
    if dtype != "int8":
        return _cast(values, dtype)
    wide = values.astype("float32")
    magnitudes = wide.abs().max(axis=-1, keepdim=True)
    is_broken = paddle.logical_not(paddle.isfinite(wide).all(axis=-1, keepdim=True))
    is_zero = magnitudes < float(_LEAST)
    one, zero, nan = (paddle.full([], value, "float32") for value in (1.0, 0.0, float("nan")))
    usable = paddle.where(paddle.logical_or(is_broken, is_zero), one, magnitudes)
    scales = paddle.where(is_broken, nan, paddle.where(is_zero, zero, usable / float(_LARGEST)))
    factors = paddle.where(is_zero, zero, paddle.full([], _LARGEST, "float32") / usable)
    products = paddle.where(is_broken, zero, wide) * factors
    numbers = ((products + _ROUNDER) - _ROUNDER).astype("int8")
    return paddle.concat([numbers, scales.view("int8")], axis=-1)


def widened_items(items: paddle.Tensor, stored: str, computed: str) -> paddle.Tensor:
    """Return what `[…, slot items]` stand for, `[…, head_dim]` of the dtype `computed`."""
    if stored != "int8":
        return _cast(items, computed)
    numbers = items[..., :-_SCALE_BYTES].astype("float32")
    scales = items[..., -_SCALE_BYTES:].contiguous().view("float32")
    return (numbers * scales).astype(computed)


def _cast(values: paddle.Tensor, dtype: str) -> paddle.Tensor:
    """Return `values` as `dtype`, without a copy where they have it."""
    return values if values.dtype == getattr(paddle, dtype) else values.astype(dtype)
