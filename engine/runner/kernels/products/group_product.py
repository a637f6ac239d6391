"""Products of float32 rows with panels of any format: the weights are widened in registers.

Every element is one chain of fused multiply-adds in the order of the inputs, as in `panel_product`;
the number of rows and panels computed together changes nothing in it. For many rows a panel is
widened once, into floats, which `panel_product` takes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic

from engine.runner.kernels.compiled import compiled_address, own_function, switch_rows
from engine.runner.kernels.products.group_layout import (
    LAYOUTS,
    PanelLayout,
    emit_weights,
    group_at,
)
from engine.runner.kernels.products.panel_product import TILE_BYTES
from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT64,
    LANES,
    constant,
    declare_fma,
    emit_loop,
    keep_loads_behind,
    prefetch,
    splat,
    vector_at,
)

FEW_ROWS = 4 if get_host_cpu_features().get("avx512f") else 2
"""The most rows of a product; more are computed from widened panels."""
_PANELS = 2
_VECTOR_BYTES = 4 * LANES
_CACHE_LINE_BYTES = 64


def prefetch_group(builder: Any, layout: PanelLayout, ahead: Any, index: Any) -> None:
    """Prefetch as many bytes as a group has, `index` groups after `ahead`."""
    size = layout.group_bytes + layout.header // 8
    at = builder.add(ahead, builder.mul(index, INT64(size)))
    for line in range(0, size, _CACHE_LINE_BYTES):
        prefetch(builder, builder.add(at, INT64(line)))


# Few float rows times stored panels. One turn of the loop is one group of both panels: its numbers
# are unpacked and widened to floats, times step plus minimum, sixteen outputs for each of the
# group's inputs, and each of them enters the rows' chains in the order of the inputs, as in
# `panel_product`. Widening costs several instructions a weight, which does not matter while the
# loop waits for memory; with more than `FEW_ROWS` rows it would be repeated for each tile, so these
# take the panel from `_widen`. Both panels of a pair are always computed: with few rows there would
# be too few chains to hide the latency of a multiply-add. Where there is no second panel, the first
# is computed twice.
def _emit_product(
    builder: Any, layout: PanelLayout, num_rows: int, a: Any, first_panel: Any, second_panel: Any,
    depth: Any, c: Any, ahead: Any, second_ahead: Any,
) -> None:  # fmt: skip
    fma = declare_fma(builder)
    rows_at = builder.inttoptr(a, FLOAT.as_pointer())
    row_ats = [builder.gep(rows_at, [builder.mul(depth, INT64(r))]) for r in range(num_rows)]

    def group(index: Any, sums: list[Any]) -> list[Any]:
        sums = list(sums)
        for at in (ahead, second_ahead):
            prefetch_group(builder, layout, at, index)
        panels = [
            emit_weights(builder, layout, group_at(builder, layout, panel, index))
            for panel in (first_panel, second_panel)
        ]
        first_input = builder.mul(index, INT64(layout.inputs))
        for k, weights in enumerate(zip(*panels, strict=True)):
            input_index = builder.add(first_input, INT64(k))
            for row, row_at in enumerate(row_ats):
                keep_loads_behind(builder)
                value = splat(builder, builder.load(builder.gep(row_at, [input_index]), align=4))
                for panel, weight in enumerate(weights):
                    n = row * _PANELS + panel
                    sums[n] = builder.call(fma, [value, weight, sums[n]])
        return sums

    count = builder.sdiv(depth, INT64(layout.inputs))
    sums = emit_loop(builder, count, [constant(0.0)] * (num_rows * _PANELS), group)
    for n, total in enumerate(sums):
        pointer = INT64(n % _PANELS * TILE_BYTES + n // _PANELS * _VECTOR_BYTES)
        builder.store(total, vector_at(builder, builder.add(c, pointer)), align=4)


@intrinsic(prefer_literal=True)
def _few_rows(
    typing: Any, code: Any, rows: Any, a: Any, first: Any, second: Any, depth: Any, c: Any,
    ahead: Any, second_ahead: Any,
) -> Any:  # fmt: skip
    layout = LAYOUTS[code.literal_value]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def make(num_rows: int) -> Any:
            name = f"few_{num_rows}_rows_{layout.name}"
            return own_function(
                builder.module, name, len(args) - 2,
                lambda own, own_args: _emit_product(own, layout, num_rows, *own_args),
            )  # fmt: skip

        switch_rows(builder, args[1], range(1, FEW_ROWS + 1), args[2:], make)
        return context.get_dummy_value()

    return types.void(code, *[types.int64] * 8), codegen


@intrinsic(prefer_literal=True)
def _widen(typing: Any, code: Any, panel: Any, depth: Any, out: Any) -> Any:
    layout = LAYOUTS[code.literal_value]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, panel, depth, out = args

        def group(index: Any, _: list[Any]) -> list[Any]:
            at = group_at(builder, layout, panel, index)
            target = builder.add(out, builder.mul(index, INT64(layout.inputs * _VECTOR_BYTES)))
            for k, weight in enumerate(emit_weights(builder, layout, at)):
                pointer = builder.add(target, INT64(k * _VECTOR_BYTES))
                builder.store(weight, vector_at(builder, pointer), align=4)
            return []

        emit_loop(builder, builder.sdiv(depth, INT64(layout.inputs)), [], group)
        return context.get_dummy_value()

    return types.void(code, *[types.int64] * 3), codegen


@cache
def few_rows_kernel(code: int) -> int:
    """Return the address of a format's product, which is compiled now or loaded.

    Its arguments: `rows` ≤ `FEW_ROWS`, the rows' address, those of one panel or two (0: no second
    one), `depth`, the sums' `[2, TILE_ROWS, 16]`, and two from which as many bytes as a panel has
    are prefetched.
    """

    def few_rows(rows, a, first, second, depth, c, ahead, second_ahead):  # type: ignore[no-untyped-def]
        if second == 0:  # the first one's sums are then computed twice
            second, second_ahead = first, ahead
        _few_rows(code, rows, a, first, second, depth, c, ahead, second_ahead)

    return compiled_address(few_rows, LAYOUTS[code].name)


@cache
def widening_kernel(code: int) -> int:
    """Return the address of a format's widening of a panel: its address, `depth`, the floats'.

    The floats are `[depth, 16]`.
    """

    def widen(panel, depth, out, _a, _b, _c, _d, _e):  # type: ignore[no-untyped-def]
        _widen(code, panel, depth, out)

    return compiled_address(widen, LAYOUTS[code].name)
