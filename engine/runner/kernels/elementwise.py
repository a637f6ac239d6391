"""exp and SiLU as plain float32 arithmetic: without fast-math every lane rounds like a scalar."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.runner.kernels.vector_ir import float_from_bits

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUNDER = np.float32(12582912.0)  # 1.5 · 2^23: adding and taking it away rounds to an integer
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


@njit(nogil=True, cache=True)
def exp_f32(x: np.float32) -> np.float32:
    """e^x within 2 units in the last place; exactly 1 at 0; 0 below -87; capped at e^88."""
    clipped = x if x > _LOWEST else _LOWEST
    clipped = clipped if clipped < _HIGHEST else _HIGHEST
    n = (clipped * _LOG2_E + _ROUNDER) - _ROUNDER
    r = (clipped - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    value = (p * (r * r) + r) + _ONE
    scale = float_from_bits(np.int32((np.int32(n) + 127) << 23))
    return value * scale if x >= _LOWEST else _ZERO


@njit(nogil=True, cache=True)
def silu_f32(x: np.float32) -> np.float32:
    """x / (1 + e^-x)."""
    return x / (_ONE + exp_f32(-x))
