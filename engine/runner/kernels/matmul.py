"""Matrix products on packed weights, fused with the operation that follows in a decoder layer.

A weight `[num_outputs, num_inputs]` is packed once into panels `[num_panels, num_inputs, 16]`: the
sixteen outputs of a panel are adjacent, so a tile reads it sequentially, at any number of rows. A
weight in bytes has panels `[num_panels, num_inputs + 4, 16]`, which end with their outputs' scales
(`panel_product`); every product takes either kind. A team divides the panels. Weights are read from
memory once per `_BLOCK_ROWS` rows, a block whose inputs fit into a core's own cache.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from engine.runner.kernels.panel_product import PANEL_ROWS, PREFETCH_BYTES, panel_product
from engine.runner.kernels.team import (
    SHARES_PER_THREAD,
    claim,
    finish,
    new_progress,
    wait_for_all,
)
from engine.runner.kernels.vector_ir import LANES
from engine.runner.kernels.vector_math import silu_product, sum_squares

_BLOCK_ROWS = 96
_FLOAT_BYTES = 4
_LARGEST_BYTE = 127
ROWS_PER_SHARE = 16
"""Rows of a share of row-wise work; a smaller share would cost less than its claim."""


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def pack_rows(weight: np.ndarray, panels: np.ndarray, first_panel: int, panel_step: int) -> None:
    """Copy `weight` `[outputs, inputs]` into every `panel_step`-th panel from `first_panel`.

    Missing outputs of a last, partial panel are not written.
    """
    num_outputs, num_inputs = weight.shape
    for panel in prange(-(-num_outputs // LANES)):
        target = panels[first_panel + panel * panel_step]
        lanes = min(LANES, num_outputs - panel * LANES)
        for k in range(num_inputs):
            for lane in range(lanes):
                target[k, lane] = weight[panel * LANES + lane, k]


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def pack_rows_as_bytes(
    weight: np.ndarray, panels: np.ndarray, first_panel: int, panel_step: int
) -> None:
    """Pack rows like `pack_rows`, each rounded to bytes: 127 steps of its largest weight.

    Missing outputs of a last, partial panel are not written.
    """
    num_outputs, num_inputs = weight.shape
    for panel in prange(-(-num_outputs // LANES)):
        target = panels[first_panel + panel * panel_step]
        scales = target[num_inputs:].reshape(-1).view(np.float32)
        for lane in range(min(LANES, num_outputs - panel * LANES)):
            row = weight[panel * LANES + lane]
            largest = np.float32(0.0)
            for k in range(num_inputs):
                largest = max(largest, abs(row[k]))
            scales[lane] = largest / np.float32(_LARGEST_BYTE)
            steps = np.float32(_LARGEST_BYTE) / largest if largest > 0 else np.float32(0.0)
            for k in range(num_inputs):
                target[k, lane] = np.int8(np.rint(row[k] * steps))


@njit(nogil=True, cache=True, error_model="numpy")
def gather_columns(panels: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Set `out[i] = weight[ids[i]]` from a packed weight: embeddings from a tied projection."""
    for i in range(ids.shape[0]):
        panel, lane = ids[i] // LANES, ids[i] % LANES
        for k in range(out.shape[1]):
            out[i, k] = panels[panel, k, lane]


@njit(nogil=True, cache=True, error_model="numpy")
def _even_part(total, most) -> int:  # type: ignore[no-untyped-def]
    """Return the size of equal parts of `total`, as few as possible of at most `most` each.

    32 rows are four tiles of 8 rows, not three of 10 and one of 2: a tile of few rows takes as long
    as one of several.
    """
    return -(-total // max(1, -(-total // most)))


@njit(nogil=True, cache=True, error_model="numpy")
def _ahead_of(panel_at, panel_bytes, tile, num_tiles, is_first, is_last):  # type: ignore[no-untyped-def]
    """Return what to prefetch, for both panels, while a tile of rows is multiplied with them.

    A single tile prefetches its own panels, a little ahead. Of several tiles the first two prefetch
    the next pair, one panel each; otherwise nothing would be read from memory while the others
    compute.
    """
    ahead = panel_at + PREFETCH_BYTES
    second_ahead = ahead + panel_bytes
    if num_tiles == 1 or is_last or tile > 1:
        return ahead, second_ahead
    following = panel_at + 2 * panel_bytes
    if is_first:  # no tile has prefetched this pair
        return (ahead, second_ahead) if tile == 0 else (following, following + panel_bytes)
    return (following, second_ahead) if tile == 0 else (ahead, following + panel_bytes)


@njit(nogil=True, cache=True, error_model="numpy")
def _put(tile, rows, bias, residual, out, row, column) -> None:  # type: ignore[no-untyped-def]
    """Write a finished tile, plus bias and residual, to `out` from `row` and `column` on."""
    lanes = min(LANES, out.shape[1] - column)
    for r in range(rows):
        if bias.size:
            for lane in range(LANES):
                tile[r, lane] += bias[column + lane]
        if residual.size:
            for lane in range(LANES):
                tile[r, lane] += residual[row + r, column + lane]
        for lane in range(lanes):
            out[row + r, column + lane] = tile[r, lane]


@njit(nogil=True, cache=True, error_model="numpy")
def _linear_part(x, panels, bias, residual, out, first, last, tiles) -> None:  # type: ignore[no-untyped-def]
    num_rows, depth = x.shape
    x_at, panels_at, tiles_at = x.ctypes.data, panels.ctypes.data, tiles.ctypes.data
    panel_bytes = panels.shape[1] * LANES * panels.itemsize
    block_rows = _even_part(num_rows, _BLOCK_ROWS)
    for block in range(0, num_rows, block_rows):
        block_end = min(num_rows, block + block_rows)
        tile_rows = _even_part(block_end - block, PANEL_ROWS)
        num_tiles = -(-(block_end - block) // tile_rows)
        for panel in range(first, last, 2):
            count = min(2, last - panel)
            panel_at = panels_at + panel * panel_bytes
            for row in range(block, block_end, tile_rows):
                rows = min(tile_rows, block_end - row)
                row_at = x_at + row * depth * _FLOAT_BYTES
                ahead, second_ahead = _ahead_of(
                    panel_at, panel_bytes, (row - block) // tile_rows, num_tiles,
                    panel == first, panel + 2 >= last,
                )  # fmt: skip
                panel_product(
                    rows, count, row_at, panel_at, depth, panels.itemsize, tiles_at, ahead,
                    second_ahead,
                )  # fmt: skip
                for n in range(count):
                    _put(tiles[n], rows, bias, residual, out, row, (panel + n) * LANES)


@njit(nogil=True, cache=True, error_model="numpy")
def linear_phase(  # type: ignore[no-untyped-def]
    progress, phase, x, panels, bias, residual, out, num_threads
) -> None:  # fmt: skip
    """Compute a team's `linear`."""
    num_panels = panels.shape[0]
    num_pairs = (num_panels + 1) // 2
    num_shares = min(num_pairs, SHARES_PER_THREAD * num_threads)
    tiles = np.empty((2, PANEL_ROWS, LANES), np.float32)
    share = claim(progress, phase)
    while share < num_shares:
        first = 2 * (num_pairs * share // num_shares)
        last = min(num_panels, 2 * (num_pairs * (share + 1) // num_shares))
        _linear_part(x, panels, bias, residual, out, first, last, tiles)
        finish(progress, phase)
        share = claim(progress, phase)
    wait_for_all(progress, phase, num_shares)


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def _team_linear(progress, x, panels, bias, residual, out, num_threads) -> None:  # type: ignore[no-untyped-def]
    for _member in prange(num_threads):
        linear_phase(progress, 0, x, panels, bias, residual, out, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def linear(
    x: np.ndarray, panels: np.ndarray, bias: np.ndarray, residual: np.ndarray, out: np.ndarray,
    num_threads: int,
) -> None:  # fmt: skip
    """Compute `out = x · weightᵀ (+ bias) (+ residual)`.

    `x` is `[rows, inputs]`, `out` `[rows, outputs]`. An empty `bias` or `residual` is none.
    `residual` may be `out`.
    """
    _team_linear(new_progress(1), x, panels, bias, residual, out, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def _gated_part(x, panels, bias, out, first, last, tiles) -> None:  # type: ignore[no-untyped-def]
    num_rows, depth = x.shape
    x_at, panels_at, gate_at = x.ctypes.data, panels.ctypes.data, tiles.ctypes.data
    out_at = out.ctypes.data
    up_at = gate_at + PANEL_ROWS * LANES * _FLOAT_BYTES
    panel_bytes = panels.shape[1] * LANES * panels.itemsize
    block_rows = _even_part(num_rows, _BLOCK_ROWS)
    for block in range(0, num_rows, block_rows):
        block_end = min(num_rows, block + block_rows)
        tile_rows = _even_part(block_end - block, PANEL_ROWS)
        num_tiles = -(-(block_end - block) // tile_rows)
        for pair in range(first, last):
            panel_at = panels_at + 2 * pair * panel_bytes
            column = pair * LANES
            for row in range(block, block_end, tile_rows):
                rows = min(tile_rows, block_end - row)
                row_at = x_at + row * depth * _FLOAT_BYTES
                ahead, second_ahead = _ahead_of(
                    panel_at, panel_bytes, (row - block) // tile_rows, num_tiles,
                    pair == first, pair + 1 >= last,
                )  # fmt: skip
                panel_product(
                    rows, 2, row_at, panel_at, depth, panels.itemsize, gate_at, ahead, second_ahead
                )  # fmt: skip
                for r in range(rows):
                    if bias.size:
                        for lane in range(LANES):
                            tiles[0, r, lane] += bias[2 * column + lane]
                            tiles[1, r, lane] += bias[2 * column + LANES + lane]
                    at = r * LANES * _FLOAT_BYTES
                    target = out_at + ((row + r) * out.shape[1] + column) * _FLOAT_BYTES
                    silu_product(gate_at + at, up_at + at, target)


@njit(nogil=True, cache=True, error_model="numpy")
def gated_phase(progress, phase, x, panels, bias, out, num_threads) -> None:  # type: ignore[no-untyped-def]
    """Compute a team's `gated_linear`."""
    num_pairs = panels.shape[0] // 2
    num_shares = min(num_pairs, SHARES_PER_THREAD * num_threads)
    tiles = np.empty((2, PANEL_ROWS, LANES), np.float32)
    share = claim(progress, phase)
    while share < num_shares:
        first = num_pairs * share // num_shares
        last = num_pairs * (share + 1) // num_shares
        _gated_part(x, panels, bias, out, first, last, tiles)
        finish(progress, phase)
        share = claim(progress, phase)
    wait_for_all(progress, phase, num_shares)


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def _team_gated(progress, x, panels, bias, out, num_threads) -> None:  # type: ignore[no-untyped-def]
    for _member in prange(num_threads):
        gated_phase(progress, 0, x, panels, bias, out, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def gated_linear(
    x: np.ndarray, panels: np.ndarray, bias: np.ndarray, out: np.ndarray, num_threads: int
) -> None:
    """Compute `out = silu(x · gateᵀ) * (x · upᵀ)`; panels and biases of gate and up alternate."""
    _team_gated(new_progress(1), x, panels, bias, out, num_threads)


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
def norm_phase(progress, phase, x, weight, epsilon, out) -> None:  # type: ignore[no-untyped-def]
    """Compute a team's `rms_norm`."""
    num_rows = x.shape[0]
    num_shares = -(-num_rows // ROWS_PER_SHARE)
    share = claim(progress, phase)
    while share < num_shares:
        for row in range(share * ROWS_PER_SHARE, min(num_rows, (share + 1) * ROWS_PER_SHARE)):
            rms_norm_row(x[row], weight, epsilon, out[row])
        finish(progress, phase)
        share = claim(progress, phase)
    wait_for_all(progress, phase, num_shares)


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: np.float32, out: np.ndarray) -> None:
    """Apply `rms_norm_row` to each row of `x` `[rows, size]`, in this thread."""
    for row in range(x.shape[0]):
        rms_norm_row(x[row], weight, epsilon, out[row])
