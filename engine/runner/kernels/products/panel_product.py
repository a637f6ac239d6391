"""The product of a few float32 rows with one or two panels of floats.

A panel's sixteen columns are `depth` rows of sixteen floats. An element is one chain of fused
multiply-adds in the order of the inner index. The number of rows and panels that are computed
together changes nothing in a chain, it only keeps the processor busy: two panels are two
independent chains for each row. Both panels are prefetched long before they are needed, also across
page ends, where the processor's own prefetching stops. So a few rows take hardly longer than one,
whose time is that of reading the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.extending import intrinsic

from engine.runner.kernels.compiled import compiled_address, own_function, switch_rows
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

_HAS_WIDE_REGISTERS = bool(get_host_cpu_features().get("avx512f"))
PANEL_ROWS = 10 if _HAS_WIDE_REGISTERS else 6
"""The most rows of a product: their accumulators and addresses stay in registers.

A vector is one of AVX-512's 32 registers, or two of AVX2's 16.
"""
_PAIR_ROWS = 10 if _HAS_WIDE_REGISTERS else 3
"""The most rows for two panels."""
_VECTOR_BYTES = 4 * LANES
TILE_ROWS = 16
"""Rows that one panel's sums have room for."""
TILE_BYTES = TILE_ROWS * _VECTOR_BYTES
PREFETCH_BYTES = 3072


# The inner loop runs over the depth. One turn loads sixteen weights of each panel, and for each row
# one input, which is copied to all lanes and multiplied into the row's sums: `rows · panels` fused
# multiply-adds on `rows + panels` loads. Every sum is a chain of its own and waits for itself one
# turn earlier, for none of the others: with ten rows and two panels twenty chains hide the latency
# of a multiply-add. More rows would not fit: sums, weights and the input share 32 registers (16
# half as wide on AVX2). `keep_loads_behind` stops LLVM from moving all loads of inputs to the
# front, which would spill the sums. Each turn prefetches one cache line of each panel to come.
def _emit_product(builder: Any, num_rows: int, num_panels: int, args: Sequence[Any]) -> None:
    """Emit the product for exactly `num_rows` rows and `num_panels` panels."""
    a, first, second, depth, c, *ahead_ats = args
    fma = declare_fma(builder)
    # All rows are addressed from one pointer, so the compiler needs few registers for them.
    rows_at = builder.inttoptr(a, FLOAT.as_pointer())
    row_ats = [builder.gep(rows_at, [builder.mul(depth, INT64(r))]) for r in range(num_rows)]
    panel_ats = [first, second][:num_panels]

    def body(index: Any, sums: list[Any]) -> list[Any]:
        new = list(sums)
        offset = builder.mul(index, INT64(_VECTOR_BYTES))
        columns = []
        for panel_at, ahead_at in zip(panel_ats, ahead_ats, strict=False):
            prefetch(builder, builder.add(ahead_at, offset))
            pointer = vector_at(builder, builder.add(panel_at, offset))
            columns.append(builder.load(pointer, align=4))
        for row, row_at in enumerate(row_ats):  # one register for all of a row's panels
            keep_loads_behind(builder)
            scalar = splat(builder, builder.load(builder.gep(row_at, [index]), align=4))
            for panel, column in enumerate(columns):
                n = row * num_panels + panel
                new[n] = builder.call(fma, [scalar, column, new[n]])
        return new

    sums = emit_loop(builder, depth, [constant(0.0)] * (num_rows * num_panels), body)
    for n, total in enumerate(sums):
        row, panel = divmod(n, num_panels)
        pointer = builder.add(c, INT64(panel * TILE_BYTES + row * _VECTOR_BYTES))
        builder.store(total, vector_at(builder, pointer), align=4)


def _products(num_panels: int, most_rows: int) -> Any:
    """Return the product for this many panels, for up to `most_rows` rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def make(num_rows: int) -> Any:
            return own_function(
                builder.module, f"product_of_{num_rows}_rows_{num_panels}_panels", len(args) - 1,
                lambda own, own_args: _emit_product(own, num_rows, num_panels, own_args),
            )  # fmt: skip

        switch_rows(builder, args[0], range(1, most_rows + 1), args[1:], make)
        return context.get_dummy_value()

    @intrinsic
    def products(
        typing: Any, rows: Any, a: Any, first: Any, second: Any, depth: Any, c: Any, ahead: Any,
        second_ahead: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 8), codegen

    return products


_one_panel = _products(1, PANEL_ROWS)
_two_panels = _products(2, _PAIR_ROWS)


@njit(nogil=True, cache=True, error_model="numpy")
def panel_product(
    rows: int, a: int, first: int, second: int, depth: int, c: int, ahead: int, second_ahead: int
) -> None:
    """Compute `c[p, r, 0:16] = Σ_k a[r, k] · panel_p[k, 0:16]`.

    `rows` ≤ `PANEL_ROWS`; `a` is `[rows, depth]`; `first` and `second` (0: none) are panels, `c` is
    `[2, TILE_ROWS, 16]`. Meanwhile as many bytes as a panel has are prefetched from `ahead`, and
    from `second_ahead` for the second one. A panel prefetches itself from `PREFETCH_BYTES` after
    its beginning.
    """
    if second and rows <= _PAIR_ROWS:
        _two_panels(rows, a, first, second, depth, c, ahead, second_ahead)
        return
    for panel in range(2 if second else 1):
        panel_at, ahead_at = (second, second_ahead) if panel else (first, ahead)
        _one_panel(rows, a, panel_at, 0, depth, c + panel * TILE_BYTES, ahead_at, 0)


@cache
def float_kernel() -> int:
    """Return the address of `panel_product`, which is compiled now or loaded."""

    def product(rows, a, first, second, depth, c, ahead, second_ahead):  # type: ignore[no-untyped-def]
        panel_product(rows, a, first, second, depth, c, ahead, second_ahead)

    return compiled_address(product, "floats")
