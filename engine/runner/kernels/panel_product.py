"""The primitive of all products with weights: a few rows times one or two packed panels.

A panel's sixteen columns are `depth` rows of sixteen floats; or, as bytes, `depth` rows of sixteen
signed bytes and then their sixteen scales as floats. Widening a byte is exact.

An element of a panel of floats is one chain of fused multiply-adds in the order of the inner index.
For a panel of bytes it is two chains, over the even and over the odd inner indices; their sum is
multiplied with the column's scale. The number of rows and panels that are computed together changes
nothing in a chain, it only keeps the processor busy: two panels are two independent chains for each
row. Both panels are prefetched long before they are needed, also across page ends, where the
processor's own prefetching stops. So a few rows take hardly longer than one, whose time is that of
reading the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT64,
    INT_VECTOR,
    LANES,
    VECTOR,
    constant,
    declare_fma,
    keep_loads_behind,
    keep_rolled,
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
_BYTE_PAIR_ROWS = 4 if _HAS_WIDE_REGISTERS else 1
_BYTE_ROWS = 8 if _HAS_WIDE_REGISTERS else 3
"""The most rows for two panels or a panel of bytes, with two accumulators per element."""
SCALE_ROWS = 4
"""Rows of a panel of bytes that hold its scales: 16 floats are 64 bytes."""
_FLOAT_BYTES = 4
_CACHE_LINE_BYTES = 64
PREFETCH_BYTES = 3072
_TURN_ROWS = {4: 1, 1: 4}
"""Inner indices per loop turn, by an item's bytes: an even number, whole cache lines."""
_CHAINS = {4: 1, 1: 2}
_BYTES = ir.VectorType(ir.IntType(8), LANES)


def _columns_at(builder: Any, address: Any, item_bytes: int) -> Any:
    """Load one inner index's sixteen weights, as floats."""
    if item_bytes == _FLOAT_BYTES:
        return builder.load(vector_at(builder, address), align=4)
    stored = builder.load(vector_at(builder, address, _BYTES), align=LANES)
    return builder.sitofp(builder.sext(stored, INT_VECTOR), VECTOR)


def _emit_sums(
    builder: Any,
    row_ats: list[Any],
    panel_ats: list[Any],
    ahead_ats: list[Any],
    depth: Any,
    item_bytes: int,
) -> dict[tuple[int, int], Any]:
    """Emit the loop over the inner index; return each (row, panel)'s sum, not yet scaled."""
    fma = declare_fma(builder)
    chains, row_bytes = _CHAINS[item_bytes], LANES * item_bytes
    start = builder.block
    loop = builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    index.add_incoming(INT64(0), start)
    pairs = [(row, panel) for row in range(len(row_ats)) for panel in range(len(panel_ats))]
    begun = {(pair, chain): builder.phi(VECTOR) for pair in pairs for chain in range(chains)}
    sums = dict(begun)
    for step in range(_TURN_ROWS[item_bytes]):
        k = builder.add(index, INT64(step))
        offset = builder.mul(k, INT64(row_bytes))
        columns = []
        for panel_at, ahead_at in zip(panel_ats, ahead_ats, strict=False):
            if step * row_bytes % _CACHE_LINE_BYTES == 0:
                prefetch(builder, builder.add(ahead_at, offset))
            columns.append(_columns_at(builder, builder.add(panel_at, offset), item_bytes))
        for row, row_at in enumerate(row_ats):  # one register for all of a row's panels
            keep_loads_behind(builder)
            scalar = splat(builder, builder.load(builder.gep(row_at, [k]), align=4))
            for panel in range(len(panel_ats)):
                chain = (row, panel), step % chains
                sums[chain] = builder.call(fma, [scalar, columns[panel], sums[chain]])
    for chain, phi in begun.items():
        phi.add_incoming(constant(0.0), start)
        phi.add_incoming(sums[chain], loop)
    next_index = builder.add(index, INT64(_TURN_ROWS[item_bytes]))
    index.add_incoming(next_index, loop)
    branch = builder.cbranch(builder.icmp_signed("<", next_index, depth), loop, end)
    keep_rolled(builder, branch)
    builder.position_at_end(end)
    if chains == 1:
        return {pair: sums[pair, 0] for pair in pairs}
    return {pair: builder.fadd(sums[pair, 0], sums[pair, 1]) for pair in pairs}


def _emit_product(
    builder: Any, num_rows: int, num_panels: int, item_bytes: int, args: Sequence[Any]
) -> None:
    """Emit the product for exactly `num_rows` rows and `num_panels` panels."""
    a, b, second, depth, c, *ahead_ats = args
    # All rows are addressed from one pointer, so the compiler needs few registers for them.
    rows_at = builder.inttoptr(a, FLOAT.as_pointer())
    row_ats = [builder.gep(rows_at, [builder.mul(depth, INT64(r))]) for r in range(num_rows)]
    is_bytes = item_bytes == 1
    weights_bytes = builder.mul(depth, INT64(LANES * item_bytes))
    panel_ats = [b, second][:num_panels]
    sums = _emit_sums(builder, row_ats, panel_ats, ahead_ats, depth, item_bytes)
    for (row, panel), total in sums.items():
        if is_bytes:
            scales_at = vector_at(builder, builder.add(panel_ats[panel], weights_bytes))
            total = builder.fmul(total, builder.load(scales_at, align=LANES))
        place = INT64(_FLOAT_BYTES * LANES * (panel * PANEL_ROWS + row))
        builder.store(total, vector_at(builder, builder.add(c, place)), align=4)


def _own_function(module: Any, num_rows: int, num_panels: int, item_bytes: int) -> Any:
    """Return the product for exactly these numbers as a function that is never inlined.

    Its loop then has all registers, whatever the code around the call needs.
    """
    kind = ir.FunctionType(ir.VoidType(), [INT64] * 7)
    name = f"product_of_{num_rows}_rows_{num_panels}_panels_{item_bytes}_bytes"
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _emit_product(builder, num_rows, num_panels, item_bytes, function.args)
    builder.ret_void()
    return function


def _products(num_panels: int, item_bytes: int, most_rows: int) -> Any:
    """Return the product for this many panels of this kind, for up to `most_rows` rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        done = builder.append_basic_block("done")
        cases = [builder.append_basic_block(f"rows_{n}") for n in range(1, most_rows + 1)]
        switch = builder.switch(args[0], cases[0])
        for num_rows, case in enumerate(cases, 1):
            if num_rows > 1:
                switch.add_case(INT64(num_rows), case)
            builder.position_at_end(case)
            function = _own_function(builder.module, num_rows, num_panels, item_bytes)
            builder.call(function, args[1:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    @intrinsic
    def products(
        typing: Any, rows: Any, a: Any, b: Any, second: Any, depth: Any, c: Any, ahead: Any,
        second_ahead: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 8), codegen

    return products


_one_panel = _products(1, _FLOAT_BYTES, PANEL_ROWS)
_two_panels = _products(2, _FLOAT_BYTES, _PAIR_ROWS)
_one_panel_of_bytes = _products(1, 1, _BYTE_ROWS)
_two_panels_of_bytes = _products(2, 1, _BYTE_PAIR_ROWS)


@njit(nogil=True, cache=True, error_model="numpy")
def float_product(rows, a, b, second, depth, c, ahead, second_ahead) -> None:  # type: ignore[no-untyped-def]
    """Compute `panel_product` with the panels of floats at `b` and `second` (0: only one)."""
    if second and rows <= _PAIR_ROWS:
        _two_panels(rows, a, b, second, depth, c, ahead, second_ahead)
        return
    for panel in range(2 if second else 1):
        b_at, ahead_at = (second, second_ahead) if panel else (b, ahead)
        c_at = c + panel * PANEL_ROWS * LANES * _FLOAT_BYTES
        _one_panel(rows, a, b_at, 0, depth, c_at, ahead_at, 0)


@njit(nogil=True, cache=True, error_model="numpy")
def _byte_product(rows, panels, a, b, depth, c, ahead, second_ahead) -> None:  # type: ignore[no-untyped-def]
    if panels == 2 and rows <= _BYTE_PAIR_ROWS:
        second = b + (depth + SCALE_ROWS) * LANES
        _two_panels_of_bytes(rows, a, b, second, depth, c, ahead, second_ahead)
        return
    for panel in range(panels):
        b_at = b + panel * (depth + SCALE_ROWS) * LANES
        ahead_at = second_ahead if panel else ahead
        for first in range(0, rows, _BYTE_ROWS):
            a_at = a + first * depth * _FLOAT_BYTES
            c_at = c + (panel * PANEL_ROWS + first) * LANES * _FLOAT_BYTES
            few = min(_BYTE_ROWS, rows - first)
            _one_panel_of_bytes(few, a_at, b_at, 0, depth, c_at, ahead_at, 0)


@njit(nogil=True, cache=True, error_model="numpy")
def panel_product(
    rows: int, panels: int, a: int, b: int, depth: int, item_bytes: int, c: int, ahead: int,
    second_ahead: int,
) -> None:  # fmt: skip
    """Compute `c[p, r, 0:16] = Σ_k a[r, k] · b[p, k, 0:16]`.

    `rows` ≤ `PANEL_ROWS`, `panels` ≤ 2. `a` is `[rows, depth]` with a `depth` divisible by four,
    `b` the first of adjacent panels with items of one byte or four, `c` `[2, PANEL_ROWS, 16]`.
    Panels of bytes are aligned to 16. Meanwhile as many bytes as a panel has are prefetched from
    `ahead`, and from `second_ahead` for the second one. A panel prefetches itself from
    `PREFETCH_BYTES` behind its beginning.
    """
    if item_bytes == 1:
        _byte_product(rows, panels, a, b, depth, c, ahead, second_ahead)
    else:
        second = b + depth * LANES * _FLOAT_BYTES if panels == 2 else 0
        float_product(rows, a, b, second, depth, c, ahead, second_ahead)
