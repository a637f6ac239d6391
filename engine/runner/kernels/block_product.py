"""Products of float32 rows with panels of any format: the weights are widened in registers.

Every element is one chain of fused multiply-adds in the order of the inputs, as in `panel_product`;
the number of rows and panels computed together changes nothing in it. For many rows a panel is
widened once, into floats, which `panel_product` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import cfunc, types
from numba.extending import intrinsic

from engine.runner.kernels.block_layout import LAYOUTS, PanelLayout, block_at, emit_weights
from engine.runner.kernels.compiled import SIGNATURE, address_of
from engine.runner.kernels.panel_product import PANEL_ROWS
from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT64,
    LANES,
    constant,
    declare_fma,
    keep_loads_behind,
    keep_rolled,
    prefetch,
    splat,
    vector_at,
)

FEW_ROWS = 4 if get_host_cpu_features().get("avx512f") else 2
"""The most rows of a product; more are computed from widened panels."""
_PANELS = 2
_TILE_BYTES = 4 * LANES
_CACHE_LINE_BYTES = 64


def emit_loop(builder: Any, count: Any, begun: list[Any], body: Any) -> list[Any]:
    """Emit `for index in range(count): state = body(index, state)`; return the state."""
    start = builder.block
    loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    phis = [builder.phi(value.type) for value in begun]
    state = body(index, phis)
    following = builder.add(index, INT64(1))
    index.add_incoming(INT64(0), start)
    index.add_incoming(following, builder.block)
    for phi, first, new in zip(phis, begun, state, strict=True):
        phi.add_incoming(first, start)
        phi.add_incoming(new, builder.block)
    branch = builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
    keep_rolled(builder, branch)
    builder.position_at_end(end)
    return state


def prefetch_block(builder: Any, layout: PanelLayout, ahead: Any, index: Any) -> None:
    """Prefetch as many bytes as a block has, `index` blocks behind `ahead`."""
    size = layout.block_bytes + layout.header // 8
    at = builder.add(ahead, builder.mul(index, INT64(size)))
    for line in range(0, size, _CACHE_LINE_BYTES):
        prefetch(builder, builder.add(at, INT64(line)))


def _emit_product(builder: Any, layout: PanelLayout, num_rows: int, args: Sequence[Any]) -> None:
    a, first_panel, second_panel, depth, c, ahead, second_ahead = args
    fma = declare_fma(builder)
    rows_at = builder.inttoptr(a, FLOAT.as_pointer())
    row_ats = [builder.gep(rows_at, [builder.mul(depth, INT64(r))]) for r in range(num_rows)]

    def block(index: Any, sums: list[Any]) -> list[Any]:
        sums = list(sums)
        for at in (ahead, second_ahead):
            prefetch_block(builder, layout, at, index)
        panels = [
            emit_weights(builder, layout, block_at(builder, layout, panel, index))
            for panel in (first_panel, second_panel)
        ]
        first_input = builder.mul(index, INT64(layout.inputs))
        for k, weights in enumerate(zip(*panels, strict=True)):
            place = builder.add(first_input, INT64(k))
            for row, row_at in enumerate(row_ats):
                keep_loads_behind(builder)
                value = splat(builder, builder.load(builder.gep(row_at, [place]), align=4))
                for panel, weight in enumerate(weights):
                    n = row * _PANELS + panel
                    sums[n] = builder.call(fma, [value, weight, sums[n]])
        return sums

    count = builder.sdiv(depth, INT64(layout.inputs))
    sums = emit_loop(builder, count, [constant(0.0)] * (num_rows * _PANELS), block)
    for n, total in enumerate(sums):
        place = INT64(_TILE_BYTES * (n % _PANELS * PANEL_ROWS + n // _PANELS))
        builder.store(total, vector_at(builder, builder.add(c, place)), align=4)


def own_function(module: Any, name: str, num_args: int, emit: Any) -> Any:
    """Return a function of integers that is never inlined; `emit(builder, args)` is its body.

    Its loop then has all registers, whatever the code around the call needs.
    """
    kind = ir.FunctionType(ir.VoidType(), [INT64] * num_args)
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit(builder, function.args)
    builder.ret_void()
    return function


def switch_rows(builder: Any, rows: Any, most_rows: int, args: Sequence[Any], make: Any) -> None:
    """Emit a call of `make(num_rows)`'s function with `args` for the number `rows`."""
    done = builder.append_basic_block("done")
    cases = [builder.append_basic_block(f"rows_{n}") for n in range(1, most_rows + 1)]
    switch = builder.switch(rows, cases[0])
    for num_rows, case in enumerate(cases, 1):
        if num_rows > 1:
            switch.add_case(INT64(num_rows), case)
        builder.position_at_end(case)
        builder.call(make(num_rows), args)
        builder.branch(done)
    builder.position_at_end(done)


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
                lambda own, own_args: _emit_product(own, layout, num_rows, own_args),
            )  # fmt: skip

        switch_rows(builder, args[1], FEW_ROWS, args[2:], make)
        return context.get_dummy_value()

    return types.void(code, *[types.int64] * 8), codegen


@intrinsic(prefer_literal=True)
def _widen(typing: Any, code: Any, panel: Any, depth: Any, out: Any) -> Any:
    layout = LAYOUTS[code.literal_value]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, panel, depth, out = args

        def block(index: Any, _: list[Any]) -> list[Any]:
            at = block_at(builder, layout, panel, index)
            target = builder.add(out, builder.mul(index, INT64(layout.inputs * _TILE_BYTES)))
            for k, weight in enumerate(emit_weights(builder, layout, at)):
                place = builder.add(target, INT64(k * _TILE_BYTES))
                builder.store(weight, vector_at(builder, place), align=4)
            return []

        emit_loop(builder, builder.sdiv(depth, INT64(layout.inputs)), [], block)
        return context.get_dummy_value()

    return types.void(code, *[types.int64] * 3), codegen


@cache
def few_rows_kernel(code: int) -> int:
    """Return the address of a format's product, which is compiled now or loaded.

    Its arguments: `rows` ≤ `FEW_ROWS`, the rows' address, those of one panel or two (0: no second
    one), `depth`, the sums' `[2, PANEL_ROWS, 16]`, and two from which as many bytes as a panel has
    are prefetched.
    """

    @cfunc(SIGNATURE, cache=True)
    def few_rows(rows, a, first, second, depth, c, ahead, second_ahead):  # type: ignore[no-untyped-def]
        if second == 0:  # the first one's sums are then computed twice
            second, second_ahead = first, ahead
        _few_rows(code, rows, a, first, second, depth, c, ahead, second_ahead)

    return address_of(few_rows)


@cache
def widening_kernel(code: int) -> int:
    """Return the address of a format's widening of a panel: its address, `depth`, the floats'.

    The floats are `[depth, 16]`.
    """

    @cfunc(SIGNATURE, cache=True)
    def widen(panel, depth, out, _a, _b, _c, _d, _e):  # type: ignore[no-untyped-def]
        _widen(code, panel, depth, out)

    return address_of(widen)
