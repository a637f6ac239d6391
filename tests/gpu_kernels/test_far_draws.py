"""Draws from logits that lie further from their address than 32 bits count: the row of a near draw.

The last row of many is computed. More than 2^31 numbers lie before its logits, its counts of bins
and its list, and before its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.drawing.filter_launches import (
    FilteredDraw,
    bind_filters,
    bind_weigh,
    buffer_sizes,
)
from engine.runner.gpu.drawing.mask_launches import bind_masks
from engine.runner.gpu.kernels import edits, likeliest
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import Launches
from tests.gpu_kernels.far_memory import LastProgram, array_at, behind, sparse
from tests.gpu_kernels.tiny_decoder import SHAPE, SPEC

VOCABULARY = 5000
"""Three slices, the last one not a whole one."""
SLICES = 3
FAR_ROWS = 500_000
"""More than 2^31 logits."""
FAR_MASKS = 14_000_000
"""More than 2^31 words of masks."""
FAR_LISTS = 3_000_000
"""More than 2^31 counts of bins, and numbers of lists."""
LOGITS = np.random.default_rng(2).standard_normal(VOCABULARY).astype(np.float32) * 4


class Rows:
    """Arrays of `count` rows, of which the last one is there."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        nothing: Any = None
        self.count, self.stack = count, stack
        spec = replace(SPEC, vocab_size=VOCABULARY)
        device = InterpretedDevice.properties
        self.make = Launches(LastProgram, device, spec, nothing, nothing, SHAPE)
        self.logits = self.of(LOGITS)
        self.best = self.of(np.zeros(SLICES)), self.of(np.zeros(SLICES, np.int32))
        self.tokens = self.of(np.zeros(1, np.int32))

    def of(self, own: np.ndarray) -> int:
        """Return the address of an array whose last row is `own`."""
        return behind(self.stack, (self.count - 1) * own.size, own)

    def one(self, value: float, kind: Any = np.int32) -> int:
        """Return the address of an array whose last row is a number."""
        return self.of(np.array([value], kind))

    def last(self, address: int, size: int, kind: Any) -> np.ndarray:
        """Return the last row of an array."""
        start = (self.count - 1) * size * np.dtype(kind).itemsize
        return array_at(address + start, size, kind).copy()

    def launch(self, function: Any, types: str, constants: dict[str, int], *given: int) -> None:
        """Launch a kernel for all rows, or all their slices, with arguments of these types."""
        constants = {"VOCABULARY": VOCABULARY, **constants, "IS_PROGRAMMATIC": False}
        names = [name for name in function.arg_names if name not in constants]
        spec = KernelSpec(function, dict(zip(names, types.split(), strict=True)), constants)
        grid = (self.count, SLICES) if function is edits.penalise else (self.count,)
        LastProgram(spec).bind(grid, *given)(0)

    def draw(self, temperature: float) -> None:
        """Draw a token of each row."""
        ways = (self.one(temperature, np.float32), self.one(7, np.int64), self.one(11))
        find, choose = self.make.draw_rows(self.logits, ways, self.best, self.tokens, self.count)
        find(0)
        choose(0)


def drawn(rows: Rows) -> np.ndarray:
    rows.draw(0.8)
    return rows.last(rows.tokens, 1, np.int32)


def masked(rows: Rows) -> np.ndarray:
    """All but every seventh word of tokens is withheld."""
    words = np.zeros(-(-VOCABULARY // 32), np.int32)
    words[::7] = -1
    mask = 0 if rows.count == 1 else FAR_MASKS
    with ExitStack() as stack:
        masks = behind(stack, mask * len(words), words)
        sent: Any = {"mask_rows": rows.one(mask), "masks": masks}
        bind_masks(rows.make, rows.logits, sent, rows.count)(0)
    return rows.last(rows.logits, VOCABULARY, np.float32)


def edited(rows: Rows) -> np.ndarray:
    """Biases of three tokens, then penalties for five."""
    starts = behind(rows.stack, rows.count - 1, np.array([4, 7], np.int32))
    listed = np.array([0, 0, 0, 0, 3, 4999, 2048], np.int32)
    values = np.array([0, 0, 0, 0, 2.5, -1.5, 7], np.float32)
    with ExitStack() as stack:
        lists = (behind(stack, 0, listed), behind(stack, 0, values))
        rows.launch(edits.add_listed, "*fp32 *i32 *i32 *fp32", {"TILE": 4}, rows.logits, starts,
                    *lists)  # fmt: skip
        history = behind(stack, 0, np.array([9, 3, 2047, 4999, 3, 2048], np.int32))
        rows.launch(
            edits.penalise, "*fp32 *i32 *i32 *i32 *i32 *fp32 *fp64 *fp64",
            {"SLICE": 2048, "TILE": 8}, rows.logits, rows.one(1), rows.one(2), rows.one(5), history,
            rows.one(1.3, np.float32), rows.one(0.4, np.float64), rows.one(0.2, np.float64),
        )  # fmt: skip
    return rows.last(rows.logits, VOCABULARY, np.float32)


def weighed(rows: Rows) -> np.ndarray:
    """The records of log probabilities, of the four likeliest tokens and the drawn one."""
    rows.draw(0.0)
    weights, num_tops = rows.of(np.zeros(SLICES)), rows.one(4)
    memory: Any = {"counts": rows.of(np.zeros(SLICES * 256, np.int32)), "weights": weights}
    bind_weigh(rows.make, rows.logits, rows.one(1, np.float32), rows.best[0], memory, rows.count)(0)
    records = rows.of(np.zeros(likeliest.WORDS.value, np.float32))
    rows.launch(
        likeliest.find_likeliest, "*fp32 *i32 *fp64 *i32 *fp64 i32 *fp64 *fp32 *i32",
        {"SLICE": 2048, "PARTS": 4}, rows.logits, num_tops, *rows.best, weights, SLICES,
        records, records, records,
    )  # fmt: skip
    rows.launch(likeliest.take_drawn, "*fp32 *i32 *i32 *fp32", {}, rows.logits, num_tops,
                rows.tokens, records)  # fmt: skip
    return rows.last(records, likeliest.WORDS.value, np.int32)


def filtered(rows: Rows) -> np.ndarray:
    """A draw under top-k, top-p and min-p."""
    rows.draw(0.0)
    sizes = buffer_sizes(rows.count, SLICES)
    memory: Any = {
        name: rows.stack.enter_context(sparse(num_bytes)) for name, num_bytes in sizes.items()
    }
    draw = FilteredDraw(
        logits=rows.logits, temperatures=rows.one(0.8, np.float32), seeds=rows.one(7, np.int64),
        indices=rows.one(11), top_ks=rows.one(300), top_ps=rows.one(0.97, np.float64),
        deepests=rows.one(6.0, np.float64), best_scores=rows.best[0], best_tokens=rows.best[1],
    )  # fmt: skip
    for launch in bind_filters(rows.make, draw, memory, rows.count):
        launch(0)
    first = rows.last(rows.best[1], SLICES, np.int32)[:1]
    count = rows.last(memory["listed"], 1, np.int32)
    return np.concatenate([first, count, rows.last(memory["keys"], 2048, np.int64)[: count[0]]])


@pytest.mark.parametrize(
    ("compute", "num_rows"),
    [
        (drawn, FAR_ROWS), (masked, FAR_ROWS), (edited, FAR_ROWS), (weighed, FAR_ROWS),
        (filtered, FAR_LISTS),
    ],
)  # fmt: skip
def test_a_far_row_is_drawn_as_a_near_one_is(
    compute: Callable[[Rows], np.ndarray], num_rows: int
) -> None:
    with ExitStack() as stack:
        near = compute(Rows(stack, 1))
        assert near.any()
        if len(near) == VOCABULARY:
            assert (near != LOGITS).any()
        assert np.array_equal(compute(Rows(stack, num_rows)), near)
