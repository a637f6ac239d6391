"""Work on rows by themselves: norms, and activations in int8 for the product that follows."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.runner.kernels.products.byte_rows import BYTES_PER_VALUE, quantise_row
from engine.runner.kernels.team import claim, finish, wait_for_all
from engine.runner.kernels.vector_ir import LANES
from engine.runner.kernels.vector_math import sum_squares

ROWS_PER_SHARE = 16
"""Rows of a share of row-wise work; a smaller share would cost less than its claim."""


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm_row(x: np.ndarray, weight: np.ndarray, epsilon: np.float32, out: np.ndarray) -> None:
    """Compute `out = x / sqrt(mean(x²) + epsilon) * weight` for a contiguous row (16 · n
    floats)."""
    size = x.shape[0]
    mean = sum_squares(x.ctypes.data, size // LANES) / np.float32(size)
    scale = np.float32(1.0) / np.sqrt(mean + epsilon)
    for i in range(size):
        out[i] = x[i] * scale * weight[i]


@njit(nogil=True, cache=True, error_model="numpy")
def _quantise_row_of(x, row, quantised, is_fine) -> None:  # type: ignore[no-untyped-def]
    depth = x.shape[1]
    target = quantised.ctypes.data + row * depth * BYTES_PER_VALUE
    quantise_row(x[row].ctypes.data, depth, target, is_fine)


@njit(nogil=True, cache=True, error_model="numpy")
def norm_phase(counters, x, weight, epsilon, out, quantised, is_fine) -> None:  # type: ignore[no-untyped-def]
    """Compute a team's `rms_norm`; with a `quantised` that is not empty, `out` in int8 too,
    finely if it `is_fine`."""
    num_rows = x.shape[0]
    num_shares = -(-num_rows // ROWS_PER_SHARE)
    share = claim(counters)
    while share < num_shares:
        for row in range(share * ROWS_PER_SHARE, min(num_rows, (share + 1) * ROWS_PER_SHARE)):
            rms_norm_row(x[row], weight, epsilon, out[row])
            if quantised.size:
                _quantise_row_of(out, row, quantised, is_fine)
        finish(counters)
        share = claim(counters)
    wait_for_all(counters, num_shares)


@njit(nogil=True, cache=True, error_model="numpy")
def add_norm_phase(counters, x, weight, epsilon, out) -> None:  # type: ignore[no-untyped-def]
    """Add a team's `rms_norm` of `x` to `out`; `x` becomes the norm."""
    num_rows, size = x.shape
    num_shares = -(-num_rows // ROWS_PER_SHARE)
    share = claim(counters)
    while share < num_shares:
        for row in range(share * ROWS_PER_SHARE, min(num_rows, (share + 1) * ROWS_PER_SHARE)):
            rms_norm_row(x[row], weight, epsilon, x[row])
            for i in range(size):
                out[row, i] += x[row, i]
        finish(counters)
        share = claim(counters)
    wait_for_all(counters, num_shares)


@njit(nogil=True, cache=True, error_model="numpy")
def quantise_phase(counters, x, quantised, is_fine) -> None:  # type: ignore[no-untyped-def]
    """Write a team's rows `x` in int8 to `quantised`, as `byte_rows` says; nothing if it is
    empty."""
    num_rows = x.shape[0] if quantised.size else 0
    num_shares = -(-num_rows // ROWS_PER_SHARE)
    share = claim(counters)
    while share < num_shares:
        for row in range(share * ROWS_PER_SHARE, min(num_rows, (share + 1) * ROWS_PER_SHARE)):
            _quantise_row_of(x, row, quantised, is_fine)
        finish(counters)
        share = claim(counters)
    wait_for_all(counters, num_shares)


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: np.float32, out: np.ndarray) -> None:
    """Apply `rms_norm_row` to each row of `x` `[rows, size]`, in this thread."""
    for row in range(x.shape[0]):
        rms_norm_row(x[row], weight, epsilon, out[row])


@njit(nogil=True, cache=True, error_model="numpy")
def quantise_rows(x: np.ndarray, quantised: np.ndarray, is_fine: bool) -> None:
    """Write `x` `[rows, size]` in int8 to `quantised`, as `byte_rows` says, in this thread."""
    for row in range(x.shape[0]):
        _quantise_row_of(x, row, quantised, is_fine)
