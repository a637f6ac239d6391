"""Products of int8 rows (`byte_rows`) with panels of a block format.

An element is one chain of fused multiply-adds over the blocks in order: first the block's integer
product, as a float times the row's step, with the weight's step (Q6_K: of either half); then, for
formats with minima, the row's step times its sum with the weight's minimum. The integer is exact
whatever the order of its additions, so nothing else computed at the same time changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from typing import Any

from llvmlite.binding import get_host_cpu_features
from numba import cfunc, types
from numba.extending import intrinsic

from engine.runner.kernels.compiled import SIGNATURE, address_of, own_function, switch_rows
from engine.runner.kernels.products.block_layout import (
    GROUPS,
    LAYOUTS,
    PanelLayout,
    block_at,
    emit_groups,
    emit_scales,
)
from engine.runner.kernels.products.block_product import prefetch_block
from engine.runner.kernels.products.byte_dot import (
    INSTRUCTIONS,
    available,
    emit_dot,
    emit_signed,
    makes_signed,
)
from engine.runner.kernels.products.byte_rows import OFFSET_AT, RECORD_BYTES, STEP_AT, SUM_AT
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
"""and one for so many rows: beside their sums, a block's weights just stay in registers."""
_ROWS_TOGETHER, _CHAINS = (4, 2) if _HAS_WIDE_REGISTERS else (1, 1)
"""Rows whose integer products take turns, and sums of each, which are added: independent
instructions near each other, because the next one of a sum waits for the one before."""
_CHOICES = sorted({*range(1, FEW_BYTE_ROWS + 1), BYTE_ROWS})
_TILE_BYTES = 4 * LANES


def _value(builder: Any, record: Any, at: int, kind: Any) -> Any:
    """Emit a record's number in every lane."""
    pointer = builder.inttoptr(builder.add(record, INT64(at)), kind.as_pointer())
    return splat(builder, builder.load(pointer, align=4))


# A block is 32 inputs of 16 outputs. Its weights are eight vectors of sixteen 32-bit lanes, a lane
# for each output, with the numbers of four inputs in the lane's bytes. Four bytes of a row are
# copied to all lanes, and one instruction multiplies and adds them: 64 products. The instruction
# takes unsigned weights and signed rows. Formats with an offset (Q4_0: 8, Q8_0: 128) begin their
# sum at minus the offset times the row's sum, which the record of the row has, so an offset costs
# no instruction in the loop.
#
# The integer sum of a block is exact in any order. So with AVX-512 two sums for each row, and four
# rows by turns, give independent instructions without changing a bit.
def _emit_integers(
    builder: Any, layout: PanelLayout, instruction: str, records: list[Any], groups: list[Any],
    part: int,
) -> list[Any]:  # fmt: skip
    """Emit a part of a block's integer products, one for each of the rows at `records`."""
    is_signed = makes_signed(instruction, layout.offset)
    parts, offset_at = layout.steps, 0
    if layout.offset and not is_signed:
        offset_at = OFFSET_AT[layout.offset] + 4 * part
    chains = [
        [_value(builder, record, offset_at, INT32) if offset_at else int_constant(0)]
        + [int_constant(0)] * (_CHAINS - 1)
        for record in records
    ]
    for t in range(part * GROUPS // parts, (part + 1) * GROUPS // parts):
        for record, sums in zip(records, chains, strict=True):
            row = _value(builder, record, 4 * t, INT32)
            sums[t % _CHAINS] = emit_dot(
                builder, instruction, sums[t % _CHAINS], groups[t], row, is_signed=is_signed
            )
    return [reduce(builder.add, sums) for sums in chains]


# From integers to floats, once for a block and row: the product times the row's step, then one
# fused multiply-add with the weights' step into the row's total. Q6_K has a step for each half of a
# block, and so two of these. Formats with minima add the row's step times its sum, times the
# minimum. This float chain goes over the blocks in order, and is the only place that rounds.
def _emit_rows(
    builder: Any, layout: PanelLayout, instruction: str, records: list[Any],
    block: tuple[Any, ...], totals: list[Any],
) -> list[Any]:  # fmt: skip
    """Emit a block's part of the rows at `records`; return the chains' new ends."""
    steps, minima, groups = block
    fma = declare_fma(builder)
    for part in range(layout.steps):
        products = _emit_integers(builder, layout, instruction, records, groups, part)
        for n, (record, product) in enumerate(zip(records, products, strict=True)):
            step = _value(builder, record, STEP_AT, FLOAT)
            scaled = builder.fmul(builder.sitofp(product, VECTOR), step)
            totals[n] = builder.call(fma, [scaled, steps[part], totals[n]])
    if minima is not None:
        for n, record in enumerate(records):
            row_sum = _value(builder, record, SUM_AT, FLOAT)
            totals[n] = builder.call(fma, [row_sum, minima, totals[n]])
    return totals


def _emit_product(
    builder: Any, layout: PanelLayout, instruction: str, num_rows: int, args: Sequence[Any]
) -> None:
    rows_at, panel, depth, c, ahead = args
    row_bytes = builder.mul(depth, INT64(RECORD_BYTES // 32))

    def body(index: Any, sums: list[Any]) -> list[Any]:
        prefetch_block(builder, layout, ahead, index)
        at = block_at(builder, layout, panel, index)
        groups = list(emit_groups(builder, layout, at))
        if makes_signed(instruction, layout.offset):
            groups = [emit_signed(builder, group) for group in groups]
        block = (*emit_scales(builder, layout, at), groups)
        record = builder.add(rows_at, builder.mul(index, INT64(RECORD_BYTES)))
        records = [
            builder.add(record, builder.mul(row_bytes, INT64(row))) for row in range(num_rows)
        ]
        new = []
        for first in range(0, num_rows, _ROWS_TOGETHER):
            chosen = slice(first, first + _ROWS_TOGETHER)
            new += _emit_rows(
                builder, layout, instruction, records[chosen], block, sums[chosen]
            )  # fmt: skip
        return new

    count = builder.sdiv(depth, INT64(layout.inputs))
    sums = emit_loop(builder, count, [constant(0.0)] * num_rows, body)
    for row, total in enumerate(sums):
        pointer = builder.add(c, INT64(_TILE_BYTES * row))
        builder.store(total, vector_at(builder, pointer), align=4)


@intrinsic(prefer_literal=True)
def _byte_rows(
    typing: Any, code: Any, dot: Any, rows: Any, a: Any, panel: Any, depth: Any, c: Any, ahead: Any
) -> Any:
    layout, instruction = LAYOUTS[code.literal_value], INSTRUCTIONS[dot.literal_value]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def make(num_rows: int) -> Any:
            name = f"bytes_{num_rows}_rows_{layout.name}"
            return own_function(
                builder.module, name, len(args) - 3,
                lambda own, own_args: _emit_product(own, layout, instruction, num_rows, own_args),
            )  # fmt: skip

        switch_rows(builder, args[2], _CHOICES, args[3:], make)
        return context.get_dummy_value()

    return types.void(code, dot, *[types.int64] * 6), codegen


@cache
def byte_kernel(code: int, instruction: str = "") -> int:
    """Return the address of a format's product with int8 rows, which is compiled now or loaded.

    Its arguments: `rows` ≤ `FEW_BYTE_ROWS` or = `BYTE_ROWS`, their records' address, a panel's,
    `depth`, the sums' `[rows, 16]`, and one from which as many bytes as a panel has are prefetched.
    `instruction` is one of `byte_dot.INSTRUCTIONS` (empty: the fastest).
    """
    dot = INSTRUCTIONS.index(instruction or available()[0])

    @cfunc(SIGNATURE, cache=True)
    def byte_rows(rows, a, panel, depth, c, ahead, _f, _g):  # type: ignore[no-untyped-def]
        _byte_rows(code, dot, rows, a, panel, depth, c, ahead)

    return address_of(byte_rows)
