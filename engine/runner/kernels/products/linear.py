"""Products with packed weights of any format, fused with the operation that follows in a layer.

A packed weight is one matrix or several with equal inputs, as a table with a row for each of them
(`packed`): the address of its panels, its sizes, and the addresses of its format's kernels. A team
divides the pairs of panels. Weights are read from memory once per `_BAND_ROWS` rows, a band whose
inputs fit into a core's own cache.

With float32 activations few rows are multiplied with the panels as they are stored; for more, a
pair of panels is widened into floats, which stay in the core's cache. Either way an element is the
same chain. With int8 activations (`byte_rows`) there is one kernel for any number of rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import register_jitable

from engine.runner.kernels.compiled import call_at
from engine.runner.kernels.products.byte_product import BYTE_ROWS, FEW_BYTE_ROWS
from engine.runner.kernels.products.byte_rows import BYTES_PER_VALUE
from engine.runner.kernels.products.panel_product import (
    PANEL_ROWS,
    PREFETCH_BYTES,
    TILE_BYTES,
    TILE_ROWS,
)
from engine.runner.kernels.team import (
    SHARES_PER_THREAD,
    claim,
    finish,
    new_progress,
    run_team,
    wait_for_all,
)
from engine.runner.kernels.vector_ir import LANES
from engine.runner.kernels.vector_math import put_sums

PANELS, PANEL_BYTES, OUTPUTS, DEPTH, DIRECT, DIRECT_ROWS, WIDEN, FLOATS, BYTES, FINE = range(10)
"""What a table has of a matrix. `DIRECT` is the product with stored panels, for `DIRECT_ROWS` rows;
`WIDEN` and `FLOATS` make floats of a panel and multiply with them; `BYTES` is the product with int8
activations, 0 for float32 ones; `FINE` is 1 where it takes fine rows (`byte_rows`)."""
FIELDS = 10
_BAND_ROWS = 96
_FLOAT_BYTES = 4


GATED_TILES = 3
"""Tiles of a pair of panels. A kernel that is called for one panel writes its sums to two tiles
(`group_product.few_rows_kernel`), so for the second panel of a pair to the third one."""


@register_jitable
def is_fine(table: np.ndarray) -> bool:
    """Return whether products with these matrices take fine rows in int8."""
    return bool(table[0, FINE] != 0)


@njit(nogil=True, cache=True, error_model="numpy")
def _even_part(total, most) -> int:  # type: ignore[no-untyped-def]
    """Return the size of equal parts of `total`, as few as possible of at most `most` each.

    32 rows are four tiles of 8 rows, not three of 10 and one of 2: a tile of few rows takes as long
    as one of several.
    """
    return -(-total // max(1, -(-total // most)))


@njit(nogil=True, cache=True, error_model="numpy")
def _ahead_of(tile, num_tiles, is_first, is_last, a, b, next_a, next_b):  # type: ignore[no-untyped-def]
    """Return what to prefetch, for both panels, while a tile of rows is multiplied with them.

    A single tile prefetches its own panels, a little ahead. Of several tiles the first two prefetch
    the next pair, one panel each; otherwise nothing would be read from memory while the others
    compute.
    """
    ahead, second_ahead = a + PREFETCH_BYTES, b + PREFETCH_BYTES
    if num_tiles == 1 or is_last or tile > 1:
        return ahead, second_ahead
    if is_first:  # no tile has prefetched this pair
        return (ahead, second_ahead) if tile == 0 else (next_a, next_b)
    return (next_a, second_ahead) if tile == 0 else (ahead, next_b)


@njit(nogil=True, cache=True, error_model="numpy")
def float_tile(first, second, rows, x_at, a, b, depth, c, ahead, second_ahead) -> None:  # type: ignore[no-untyped-def]
    """Multiply a tile of rows with panels `a` and `b` (0: none) by their kernels."""
    if b == 0 or first == second:
        call_at(first, rows, x_at, a, b, depth, c, ahead, second_ahead)
        return
    call_at(first, rows, x_at, a, 0, depth, c, ahead, 0)
    call_at(second, rows, x_at, b, 0, depth, c + TILE_BYTES, second_ahead, 0)


@njit(nogil=True, cache=True, error_model="numpy")
def _as_floats(weight, panel_at, rows, widened_at):  # type: ignore[no-untyped-def]
    """Return a panel's kernel for this many rows, and the address of what it multiplies with."""
    if rows <= weight[DIRECT_ROWS] or panel_at == 0:
        return weight[DIRECT], panel_at
    call_at(weight[WIDEN], panel_at, weight[DEPTH], widened_at, 0, 0, 0, 0, 0)
    return weight[FLOATS], widened_at


@njit(nogil=True, cache=True, error_model="numpy")
def _put(tile, rows, bias, residual, out, row, column, lanes) -> None:  # type: ignore[no-untyped-def]
    """Write a finished tile, plus bias and residual, to `out` from `row` and `column` on."""
    if lanes == LANES:
        bias_at = bias.ctypes.data + column * _FLOAT_BYTES if bias.size else 0
        for r in range(rows):
            column_bytes = column * _FLOAT_BYTES
            residual_at = 0
            if residual.size:
                residual_at = residual.ctypes.data + (row + r) * residual.strides[0] + column_bytes
            out_at = out.ctypes.data + (row + r) * out.strides[0] + column_bytes
            put_sums(tile.ctypes.data + r * LANES * _FLOAT_BYTES, bias_at, residual_at, out_at)
        return
    if bias.size:
        for r in range(rows):
            for lane in range(lanes):
                tile[r, lane] += bias[column + lane]
    if residual.size:
        for r in range(rows):
            for lane in range(lanes):
                tile[r, lane] += residual[row + r, column + lane]
    for r in range(rows):
        for lane in range(lanes):
            out[row + r, column + lane] = tile[r, lane]


# Products with float32 activations: three loops, and what each of them keeps where.
#
#     band of rows (≤ 96)      its inputs stay in the core's own cache
#       pair of panels          32 columns of the weights: read from memory once for the band
#         tile of rows (≤ 10)   its sums stay in registers for the whole depth
#
# With few rows there is one band and one tile, and the time is that of reading the weights: the
# kernel reads panels in their stored format (`DIRECT`) and widens in registers. With more rows the
# widening would be repeated for every tile, so a pair is widened once into `widened` (`WIDEN`) and
# multiplied from there (`FLOATS`). Both are the same chain of fused multiply-adds for each element,
# so a row has the same bits alone and among a thousand. Parts are made equal (`_even_part`),
# because a tile of two rows takes as long as one of eight. What is prefetched meanwhile is decided
# by `_ahead_of`: memory must never be idle while a tile computes from the caches.
@njit(nogil=True, cache=True, error_model="numpy")
def _floats_linear(  # type: ignore[no-untyped-def]
    x, weight, bias, residual, out, column, first, last, tiles, widened
) -> None:
    """Compute the columns of panels `first` to `last`; the matrix begins at `column`."""
    num_rows, depth = x.shape
    tiles_at, widened_at, size = tiles.ctypes.data, widened.ctypes.data, weight[PANEL_BYTES]
    band_rows = _even_part(num_rows, _BAND_ROWS)
    for band in range(0, num_rows, band_rows):
        band_end = min(num_rows, band + band_rows)
        tile_rows = _even_part(band_end - band, PANEL_ROWS)
        num_tiles = -(-(band_end - band) // tile_rows)
        for panel in range(first, last, 2):
            at = weight[PANELS] + panel * size
            next_at = at + size if panel + 1 < last else 0
            kernel, a = _as_floats(weight, at, band_end - band, widened_at)
            _, b = _as_floats(
                weight, next_at, band_end - band, widened_at + depth * LANES * _FLOAT_BYTES
            )
            for row in range(band, band_end, tile_rows):
                rows = min(tile_rows, band_end - row)
                ahead, second_ahead = _ahead_of(
                    (row - band) // tile_rows, num_tiles, panel == first,
                    panel + 2 >= last or a != at, a, b, at + 2 * size, at + 3 * size,
                )  # fmt: skip
                x_at = x.ctypes.data + row * depth * _FLOAT_BYTES
                float_tile(kernel, kernel, rows, x_at, a, b, depth, tiles_at, ahead, second_ahead)
                for n in range(min(2, last - panel)):
                    lanes = min(LANES, weight[OUTPUTS] - (panel + n) * LANES)
                    _put(
                        tiles[n], rows, bias, residual, out, row, column + (panel + n) * LANES,
                        lanes,
                    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _byte_tile_rows(left) -> int:  # type: ignore[no-untyped-def]
    """Return the rows of the next tile of int8 rows, of which so many are left."""
    return BYTE_ROWS if left >= BYTE_ROWS else _even_part(left, FEW_BYTE_ROWS)


@njit(nogil=True, cache=True, error_model="numpy")
def _byte_tile(weight, panel, rows, row, has_next, quantised, tiles_at) -> None:  # type: ignore[no-untyped-def]
    """Multiply int8 rows from `row` on with a panel; prefetch the next one if it `has_next`."""
    at = weight[PANELS] + panel * weight[PANEL_BYTES]
    ahead = at + (weight[PANEL_BYTES] if has_next else PREFETCH_BYTES)
    x_at = quantised.ctypes.data + row * weight[DEPTH] * BYTES_PER_VALUE
    call_at(weight[BYTES], rows, x_at, at, weight[DEPTH], tiles_at, ahead, 0, 0)


# Products with int8 activations. The rows were quantised once, by the phase before (`norm_phase` or
# `quantise_phase`), into records of one cache line for 32 values, so a thread reads them as they
# are. The loops are those above with one panel instead of a pair: the integer products of one panel
# already fill the registers. There is one kernel for any number of rows, because an integer sum has
# no order to keep, and the float chain over the groups is the same for every tile.
#
# Tiles have `BYTE_ROWS` rows while so many are left, then equal smaller ones. The first of several
# tiles prefetches the next panel: its weights arrive while the others compute. A single tile
# prefetches a little ahead in its own panel.
@njit(nogil=True, cache=True, error_model="numpy")
def _bytes_linear(  # type: ignore[no-untyped-def]
    quantised, weight, bias, residual, out, column, first, last, tiles
) -> None:
    num_rows, tiles_at = out.shape[0], tiles.ctypes.data
    band_rows = _even_part(num_rows, _BAND_ROWS)
    for band in range(0, num_rows, band_rows):
        band_end = min(num_rows, band + band_rows)
        for panel in range(first, last):
            lanes = min(LANES, weight[OUTPUTS] - panel * LANES)
            row = band
            while row < band_end:
                rows = _byte_tile_rows(band_end - row)
                # The first of several tiles leaves time to read the next panel.
                has_next = row == band and row + rows < band_end and panel + 1 < last
                _byte_tile(weight, panel, rows, row, has_next, quantised, tiles_at)
                _put(tiles[0], rows, bias, residual, out, row, column + panel * LANES, lanes)
                row += rows


@njit(nogil=True, cache=True, error_model="numpy")
def linear_share(  # type: ignore[no-untyped-def]
    x, quantised, table, bias, residual, out, first_pair, last_pair, tiles, widened
) -> None:
    """Compute the columns of these pairs of panels, counted over all matrices."""
    pair, column = 0, 0
    for n in range(table.shape[0]):
        weight = table[n]
        num_panels = -(-weight[OUTPUTS] // LANES)
        num_pairs = (num_panels + 1) // 2
        first = 2 * max(0, first_pair - pair)
        last = min(num_panels, 2 * (last_pair - pair))
        if first < last:
            if weight[BYTES]:
                _bytes_linear(quantised, weight, bias, residual, out, column, first, last, tiles)
            else:
                _floats_linear(x, weight, bias, residual, out, column, first, last, tiles, widened)
        pair += num_pairs
        column += weight[OUTPUTS]


@njit(nogil=True, cache=True, error_model="numpy")
def widening_scratch(table, num_rows):  # type: ignore[no-untyped-def]
    """Return memory for a pair of widened panels, none if no matrix needs it."""
    for n in range(table.shape[0]):
        if table[n, BYTES] == 0 and num_rows > table[n, DIRECT_ROWS]:
            return np.empty(2 * table[n, DEPTH] * LANES, np.float32)
    return np.empty(0, np.float32)


# The phase as a team runs it. Matrices of a table stand side by side, as query, key and value do;
# their pairs of panels are counted through, and a share is a range of pairs. So each weight is read
# by one thread, and each element of `out` is written by one. There are four shares for each thread,
# claimed in order: a thread that comes late finds some left, and each is still a long read. Where
# the borders lie depends on the number of threads, and no result depends on them.
#
# `tiles` receives a tile's sums, `widened` a pair of panels as floats; both belong to one member.
# Bias and residual are added when a tile is written: its sums are in the nearest cache then.
@njit(nogil=True, cache=True, error_model="numpy")
def linear_phase(  # type: ignore[no-untyped-def]
    counters, x, table, bias, residual, quantised, out, num_threads
) -> None:
    """Compute a team's `linear`."""
    num_pairs = 0
    for n in range(table.shape[0]):
        num_pairs += (-(-table[n, OUTPUTS] // LANES) + 1) // 2
    num_shares = min(num_pairs, SHARES_PER_THREAD * num_threads)
    tiles = np.empty((2, TILE_ROWS, LANES), np.float32)
    widened = widening_scratch(table, x.shape[0])
    share = claim(counters)
    while share < num_shares:
        first = num_pairs * share // num_shares
        last = num_pairs * (share + 1) // num_shares
        linear_share(x, quantised, table, bias, residual, out, first, last, tiles, widened)
        finish(counters)
        share = claim(counters)
    wait_for_all(counters, num_shares)


@njit(nogil=True, cache=True, error_model="numpy")
def _team_linear(  # type: ignore[no-untyped-def]
    _member, progress, x, table, bias, residual, quantised, out, num_threads
) -> None:
    linear_phase(progress[0], x, table, bias, residual, quantised, out, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def linear(
    x: np.ndarray, table: np.ndarray, bias: np.ndarray, residual: np.ndarray,
    quantised: np.ndarray, out: np.ndarray, num_threads: int,
) -> None:  # fmt: skip
    """Compute `out = x · weightᵀ (+ bias) (+ residual)` with the matrices of `table` side by side.

    `x` is `[rows, inputs]`, `out` `[rows, outputs]`. An empty `bias` or `residual` is none.
    `residual` may be `out`. `quantised` has `x` in int8, for matrices with such a kernel.
    """
    run_team(
        _team_linear,
        num_threads,
        (new_progress(1), x, table, bias, residual, quantised, out, num_threads),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _gated_tile(tiles, rows, bias, activation, out, row, column) -> None:  # type: ignore[no-untyped-def]
    """Write what `activation` makes of the finished tiles of gate and up to `out`."""
    if bias.size:
        for r in range(rows):
            for lane in range(LANES):
                tiles[0, r, lane] += bias[2 * column + lane]
                tiles[1, r, lane] += bias[2 * column + LANES + lane]
    gate_at, row_bytes = tiles.ctypes.data, out.shape[1] * _FLOAT_BYTES
    out_at = out.ctypes.data + row * row_bytes + column * _FLOAT_BYTES
    call_at(activation, gate_at, gate_at + TILE_BYTES, rows, out_at, row_bytes, 0, 0, 0)


# The gated product of an MLP: `silu(gate) * up` needs the same columns of both matrices, so the
# "pair" is one panel of each, and the activation is computed from two finished tiles before either
# is written: the two wide intermediate results never exist in memory. Gate and up may be stored in
# different formats (GGUF mixes them); then they have two kernels, and `float_tile` calls each for
# its own panel. Bands and tiles of rows are those of `_floats_linear`.
@njit(nogil=True, cache=True, error_model="numpy")
def _floats_gated(x, gate, up, bias, activation, out, first, last, tiles, widened) -> None:  # type: ignore[no-untyped-def]
    num_rows, depth = x.shape
    tiles_at, widened_at = tiles.ctypes.data, widened.ctypes.data
    band_rows = _even_part(num_rows, _BAND_ROWS)
    for band in range(0, num_rows, band_rows):
        band_end = min(num_rows, band + band_rows)
        tile_rows = _even_part(band_end - band, PANEL_ROWS)
        num_tiles = -(-(band_end - band) // tile_rows)
        for panel in range(first, last):
            gate_at = gate[PANELS] + panel * gate[PANEL_BYTES]
            up_at = up[PANELS] + panel * up[PANEL_BYTES]
            first_kernel, a = _as_floats(gate, gate_at, band_end - band, widened_at)
            second_kernel, b = _as_floats(
                up, up_at, band_end - band, widened_at + depth * LANES * _FLOAT_BYTES
            )
            for row in range(band, band_end, tile_rows):
                rows = min(tile_rows, band_end - row)
                ahead, second_ahead = _ahead_of(
                    (row - band) // tile_rows, num_tiles, panel == first,
                    panel + 1 >= last or a != gate_at, a, b, gate_at + gate[PANEL_BYTES],
                    up_at + up[PANEL_BYTES],
                )  # fmt: skip
                x_at = x.ctypes.data + row * depth * _FLOAT_BYTES
                float_tile(
                    first_kernel, second_kernel, rows, x_at, a, b, depth, tiles_at, ahead,
                    second_ahead,
                )  # fmt: skip
                _gated_tile(tiles, rows, bias, activation, out, row, panel * LANES)


@njit(nogil=True, cache=True, error_model="numpy")
def _bytes_gated(quantised, gate, up, bias, activation, out, first, last, tiles) -> None:  # type: ignore[no-untyped-def]
    num_rows, tiles_at = out.shape[0], tiles.ctypes.data
    band_rows = _even_part(num_rows, _BAND_ROWS)
    for band in range(0, num_rows, band_rows):
        band_end = min(num_rows, band + band_rows)
        for panel in range(first, last):
            row = band
            while row < band_end:
                rows = _byte_tile_rows(band_end - row)
                has_next = row == band and row + rows < band_end and panel + 1 < last
                _byte_tile(gate, panel, rows, row, has_next, quantised, tiles_at)
                _byte_tile(up, panel, rows, row, has_next, quantised, tiles_at + TILE_BYTES)
                _gated_tile(tiles, rows, bias, activation, out, row, panel * LANES)
                row += rows


# Bytes are used only if both matrices have a kernel for them: what is quantised is the input, which
# the two share.
@njit(nogil=True, cache=True, error_model="numpy")
def gated_share(  # type: ignore[no-untyped-def]
    x, quantised, gate, up, bias, activation, out, first, last, tiles, widened
) -> None:
    """Compute the columns of panels `first` to `last` of gate and up."""
    if gate[BYTES] != 0 and up[BYTES] != 0:
        _bytes_gated(quantised, gate, up, bias, activation, out, first, last, tiles)
    else:
        _floats_gated(x, gate, up, bias, activation, out, first, last, tiles, widened)


# As `linear_phase`, with pairs of one gate and one up panel.
@njit(nogil=True, cache=True, error_model="numpy")
def gated_phase(  # type: ignore[no-untyped-def]
    counters, x, table, bias, activation, quantised, out, num_threads
) -> None:
    """Compute a team's `gated_linear`."""
    gate, up = table[0], table[1]
    num_pairs = gate[OUTPUTS] // LANES
    num_shares = min(num_pairs, SHARES_PER_THREAD * num_threads)
    tiles = np.empty((GATED_TILES, TILE_ROWS, LANES), np.float32)
    widened = widening_scratch(table, x.shape[0])
    share = claim(counters)
    while share < num_shares:
        first = num_pairs * share // num_shares
        last = num_pairs * (share + 1) // num_shares
        gated_share(x, quantised, gate, up, bias, activation, out, first, last, tiles, widened)
        finish(counters)
        share = claim(counters)
    wait_for_all(counters, num_shares)


@njit(nogil=True, cache=True, error_model="numpy")
def _team_gated(  # type: ignore[no-untyped-def]
    _member, progress, x, table, bias, activation, quantised, out, num_threads
) -> None:
    gated_phase(progress[0], x, table, bias, activation, quantised, out, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def gated_linear(
    x: np.ndarray, table: np.ndarray, bias: np.ndarray, activation: int, quantised: np.ndarray,
    out: np.ndarray, num_threads: int,
) -> None:  # fmt: skip
    """Compute `out = silu(x · gateᵀ) * (x · upᵀ)`; `table` has gate and up.

    Their biases alternate, sixteen at a time. `activation` is the address of a kernel of
    `activations`, which may be another one.
    """
    run_team(
        _team_gated,
        num_threads,
        (new_progress(1), x, table, bias, activation, quantised, out, num_threads),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def gather_columns(table: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Set `out[i] = weight[ids[i]]` from a packed matrix: embeddings from a tied projection."""
    weight, depth = table[0], out.shape[1]
    widened = np.empty((depth, LANES), np.float32)
    for i in range(ids.shape[0]):
        panel, lane = ids[i] // LANES, ids[i] % LANES
        panel_at = weight[PANELS] + panel * weight[PANEL_BYTES]
        call_at(weight[WIDEN], panel_at, depth, widened.ctypes.data, 0, 0, 0, 0, 0)
        for k in range(depth):
            out[i, k] = widened[k, lane]
