"""Products of int8 rows (`byte_rows`) with panels of a grouped format.

An element is one chain of fused multiply-adds over the groups in order: first the group's integer
product, as a float times the row's step, with the weight's step (Q6_K: of either half); then, for
formats with minima, the row's step times its sum with the weight's minimum. The integer is exact
whatever the order of its additions, so nothing else computed at the same time changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic

from engine.runner.kernels.compiled import compiled_address, own_function, switch_rows
from engine.runner.kernels.products.byte_dot import (
    INSTRUCTIONS,
    available,
    emit_dot,
    emit_signed,
    makes_signed,
    vectors_together,
)
from engine.runner.kernels.products.byte_rows import (
    HALVES,
    HALVES_OFFSET,
    HALVES_OFFSET_AT,
    OFFSET_AT,
    RECORD_BYTES,
    SCALED_OFFSET,
    SCALED_OFFSET_AT,
    STEPS_AT,
    SUM_AT,
)
from engine.runner.kernels.products.group_layout import (
    LAYOUTS,
    NUM_VECTORS,
    PanelLayout,
    emit_scales,
    emit_vectors,
    group_at,
)
from engine.runner.kernels.products.group_product import prefetch_group
from engine.runner.kernels.products.panel_product import TILE_ROWS
from engine.runner.kernels.vector_ir import (
    FLOAT,
    INT32,
    INT64,
    LANES,
    VECTOR,
    constant,
    declare_fma,
    emit_loop,
    int_constant,
    splat,
    vector_at,
)

_HAS_WIDE_REGISTERS = bool(get_host_cpu_features().get("avx512f"))
FEW_BYTE_ROWS = 8 if _HAS_WIDE_REGISTERS else 3
"""There is a product for any number of rows up to this one,"""
BYTE_ROWS = TILE_ROWS if _HAS_WIDE_REGISTERS else FEW_BYTE_ROWS
"""and one for so many rows: beside their sums, a group's weights just stay in registers."""
_ROWS_TOGETHER = 4 if _HAS_WIDE_REGISTERS else 1
"""Rows whose integer products take turns, as do those of both halves: independent instructions near
each other, because the next one of a sum waits for the one before."""
_CHOICES = sorted({*range(1, FEW_BYTE_ROWS + 1), BYTE_ROWS})
_TILE_BYTES = 4 * LANES


def _value(builder: Any, record: Any, at: int, kind: Any) -> Any:
    """Emit a record's number in every lane."""
    pointer = builder.inttoptr(builder.add(record, INT64(at)), kind.as_pointer())
    return splat(builder, builder.load(pointer, align=4))


def _first_terms(
    builder: Any, layout: PanelLayout, instruction: str, record: Any, parts: int
) -> list[Any]:
    """Emit what the two sums of a record's integer products begin with.

    It takes the offset of the weight's numbers out of them. Where the products by float32 steps do
    (`_is_scaled`), an instruction with signed numbers, which have none, puts it back.
    """
    zero, is_scaled = int_constant(0), _is_scaled(layout, parts)
    if not layout.offset or is_scaled != makes_signed(instruction, layout.offset):
        return [zero] * HALVES
    if parts == 1 and not is_scaled:
        return [_value(builder, record, OFFSET_AT[layout.offset], INT32), zero]
    halves = [_value(builder, record, HALVES_OFFSET_AT + 4 * m, INT32) for m in range(HALVES)]
    if is_scaled:
        times = int_constant(-layout.offset // HALVES_OFFSET)
        halves = [builder.mul(half, times) for half in halves]
    return halves


def _is_scaled(layout: PanelLayout, parts: int) -> bool:
    """Return whether the offset is taken out of a group's product, after its float32 steps."""
    return layout.offset == SCALED_OFFSET or (layout.offset > 0 and parts > layout.steps)


def _emit_integers(
    builder: Any, layout: PanelLayout, instruction: str, records: list[Any], vectors: list[Any],
    parts: int,
) -> list[list[Any]]:  # fmt: skip
    """Emit a group's integer products for each of the rows at `records`, by part of the group."""
    is_signed = makes_signed(instruction, layout.offset)
    chains = [_first_terms(builder, layout, instruction, record, parts) for record in records]
    size = NUM_VECTORS // HALVES
    together = min(size, vectors_together(instruction, layout.largest))
    for t, half in product(range(0, size, together), range(HALVES)):
        for record, sums in zip(records, chains, strict=True):
            first = half * size + t
            numbers = range(first, min(first + together, half * size + size))
            sums[half] = emit_dot(
                builder, instruction, sums[half], [vectors[n] for n in numbers],
                [_value(builder, record, 4 * n, INT32) for n in numbers], is_signed=is_signed,
            )  # fmt: skip
    if parts == 1:
        return [[builder.add(*sums)] for sums in chains]
    return chains


# From integers to floats, once for a group and row: the product times the row's step, then one
# fused multiply-add with the weights' step into the row's total. Q6_K has a step for each half of a
# group, and so two of these. Formats with minima add the row's step times its sum, times the
# minimum. This float chain goes over the groups in order, and is the only place that rounds.
def _emit_rows(
    builder: Any, layout: PanelLayout, instruction: str, records: list[Any],
    group: tuple[Any, ...], totals: list[Any], parts: int,
) -> list[Any]:  # fmt: skip
    """Emit a group's part of the rows at `records`; return the chains' new ends."""
    steps, minima, vectors = group
    fma = declare_fma(builder)
    products = _emit_integers(builder, layout, instruction, records, vectors, parts)
    for n, (record, sums) in enumerate(zip(records, products, strict=True)):
        floats = [builder.sitofp(one, VECTOR) for one in sums]
        row_steps = [_value(builder, record, STEPS_AT + 4 * m, FLOAT) for m in range(parts)]
        if layout.offset == SCALED_OFFSET:
            lost = _value(builder, record, SCALED_OFFSET_AT, FLOAT)
            scaled = [builder.call(fma, [floats[0], row_steps[0], lost])]
        else:
            scaled = [builder.fmul(floats[0], row_steps[0])]
        if parts > layout.steps:
            scaled = [builder.call(fma, [floats[1], row_steps[1], scaled[0]])]
        elif parts > 1:
            scaled.append(builder.fmul(floats[1], row_steps[1]))
        for step, one in zip(steps, scaled, strict=True):
            totals[n] = builder.call(fma, [one, step, totals[n]])
    if minima is not None:
        for n, record in enumerate(records):
            row_sum = _value(builder, record, SUM_AT, FLOAT)
            totals[n] = builder.call(fma, [row_sum, minima, totals[n]])
    return totals


def emit_product(
    builder: Any, layout: PanelLayout, instruction: str, num_rows: int, is_fine: bool,
    args: Sequence[Any],
) -> None:  # fmt: skip
    rows_at, panel, depth, c, ahead = args
    parts = HALVES if is_fine else layout.steps
    row_bytes = builder.mul(depth, INT64(RECORD_BYTES // 32))

    def body(index: Any, sums: list[Any]) -> list[Any]:
        prefetch_group(builder, layout, ahead, index)
        at = group_at(builder, layout, panel, index)
        vectors = list(emit_vectors(builder, layout, at))
        if makes_signed(instruction, layout.offset):
            vectors = [emit_signed(builder, vector) for vector in vectors]
        steps, minima = emit_scales(builder, layout, at)
        if _is_scaled(layout, parts) and layout.offset != SCALED_OFFSET:
            minima = builder.fmul(steps[0], constant(-float(layout.offset)))
        group = steps, minima, vectors
        record = builder.add(rows_at, builder.mul(index, INT64(RECORD_BYTES)))
        records = [
            builder.add(record, builder.mul(row_bytes, INT64(row))) for row in range(num_rows)
        ]
        new = []
        for first in range(0, num_rows, _ROWS_TOGETHER):
            chosen = slice(first, first + _ROWS_TOGETHER)
            new += _emit_rows(
                builder, layout, instruction, records[chosen], group, sums[chosen], parts
            )
        return new

    count = builder.sdiv(depth, INT64(layout.inputs))
    sums = emit_loop(builder, count, [constant(0.0)] * num_rows, body)
    for row, total in enumerate(sums):
        pointer = builder.add(c, INT64(_TILE_BYTES * row))
        builder.store(total, vector_at(builder, pointer), align=4)


@intrinsic(prefer_literal=True)
def _byte_rows(
    typing: Any,
    code: Any,
    dot: Any,
    fine: Any,
    rows: Any,
    a: Any,
    panel: Any,
    depth: Any,
    c: Any,
    ahead: Any,
) -> Any:
    layout, instruction = LAYOUTS[code.literal_value], INSTRUCTIONS[dot.literal_value]
    is_fine = bool(fine.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def make(num_rows: int) -> Any:
            name = f"bytes_{num_rows}_rows_{layout.name}"
            return own_function(
                builder.module, name, len(args) - 4,
                lambda own, own_args: emit_product(
                    own, layout, instruction, num_rows, is_fine, own_args
                ),
            )  # fmt: skip

        switch_rows(builder, args[3], _CHOICES, args[4:], make)
        return context.get_dummy_value()

    return types.void(code, dot, fine, *[types.int64] * 6), codegen


@cache
def byte_kernel(code: int, instruction: str = "", *, is_fine: bool) -> int:
    """Return the address of a format's product with int8 rows, which is compiled now or loaded.

    Its arguments: `rows` ≤ `FEW_BYTE_ROWS` or = `BYTE_ROWS`, their records' address, a panel's,
    `depth`, the sums' `[rows, 16]`, and one from which as many bytes as a panel has are prefetched.
    `instruction` is one of `byte_dot.INSTRUCTIONS` (empty: the fastest).
    """
    instruction = instruction or available()[0]
    dot, fine = INSTRUCTIONS.index(instruction), int(is_fine)

    def byte_rows(rows, a, panel, depth, c, ahead, _f, _g):  # type: ignore[no-untyped-def]
        _byte_rows(code, dot, fine, rows, a, panel, depth, c, ahead)

    kind = "fine" if is_fine else "coarse"
    return compiled_address(byte_rows, f"{LAYOUTS[code].name}_{instruction}_{kind}")
