"""Quantised products in the tiles that are shipped and in others, and whole steps in each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.runner.gpu.launches import AttentionShape, Bound, Launches
from engine.runner.gpu.tiles import Tile, gate_up_tile, num_ranges, product_tile
from engine.runner.gpu.weights import Form, Matrix
from tests.gpu.stages.model import (
    CONTEXT,
    QWEN3_8B,
    Findings,
    Model,
    rows_and_results,
    tile_name,
)
from tests.gpu.stages.steps import started_step

_NAMES = ("qkv", "output", "gate_up", "down")
_SECONDS_OF_PRODUCTS = 45.0
_SECONDS_OF_STEPS = 70.0
_FORMS = (Form.Q4_0, Form.Q8_0, Form.INT4, Form.FP8)
_FEW_MATRICES = 8
_ROOM = 1 << 26
"""Bytes of results, after which their residual is, of zeros."""


@dataclass
class _Way:
    """A way to compute: tiles and ranges by product, and the shipped ones for what is left out."""

    label: str
    tiles: dict[tuple[Form, str, int], Tile] = field(default_factory=dict)
    ranges: dict[tuple[Form, str], int] = field(default_factory=dict)

    def tile(self, num_rows: int, num_outputs: int, weights: Matrix) -> Tile:
        tile = self.tiles.get((weights.form, _name(weights), num_rows))
        if tile is None:
            tile = _shipped(num_rows, _name(weights), weights)
        return tile


class _Launches(Launches):
    """Launches with another number of ranges, to time them."""

    way = _Way("shipped")

    def num_ranges(self, weights: Matrix) -> int:
        return self.way.ranges.get((weights.form, _name(weights)), num_ranges(weights))


def _name(weights: Matrix) -> str:
    sizes = {6144: "qkv", 2 * QWEN3_8B.intermediate_size: "gate_up", QWEN3_8B.vocab_size: "head"}
    return sizes.get(weights.num_outputs) or ("output" if weights.num_inputs == 4096 else "down")


def _shipped(rows: int, name: str, weights: Matrix) -> Tile:
    if name == "gate_up":
        return gate_up_tile(rows, weights.num_outputs // 2, weights)
    return product_tile(rows, weights.num_outputs, weights)


def _others(rows: int, name: str, form: Form) -> Iterator[tuple[int, Tile]]:
    """Yield ranges and tiles of quantised weights."""
    ranges = 4 if form.bits == 8 else 8
    if rows <= 16 or (rows == 32 and name != "gate_up"):
        size = 8 if rows <= 8 else rows
        shapes = [(16, 128, 3), (32, 128, 3)]
        if rows <= 16:
            shapes += [(16, 256, 3), (16, 128, 6), (32, 256, 3)][: 4 if form.bits == 8 else 5]
        for outputs, depth, stages in shapes:
            for each in (ranges, 12 - ranges):
                yield each, Tile(size, outputs, depth, each, stages, 256, is_together=True)
    if rows >= 16:
        for size, outputs, warps, stages in (
            (16, 64, 4, 4), (32, 64, 4, 4), (32, 64, 4, 6), (32, 128, 8, 4), (64, 64, 4, 4),
            (64, 64, 8, 4), (64, 128, 8, 4), (128, 64, 8, 4),
        ):  # fmt: skip
            if rows // 8 <= size <= rows and not (rows == 512 and size < 64):
                yield ranges, Tile(size, outputs, 128, warps, stages)
    if rows in (64, 128):
        yield 12 - ranges, Tile(32, 64, 128, 4, 4)


def _launch(
    make: Launches, name: str, weights: Matrix, rows: int, tile: Tile, buffers: tuple[int, int]
) -> Bound:
    if name == "gate_up":
        return make.gate_up(buffers[0], weights, buffers[1], rows, tile)
    residual = 0 if name == "qkv" else buffers[1] + _ROOM
    return make.product(buffers[0], weights, buffers[1], rows, residual=residual, tile=tile)


def tile_forms(card: Any, found: Findings) -> None:
    """Times of products, the bits of every tile, and steps. Not run unless it is named."""
    model = Model.of(card)
    x, y = rows_and_results(card)
    if card.is_real:
        card.device.fill(y.address + _ROOM, 0, _ROOM, card.stream)
    best = _Way("best")
    until = time.monotonic() + _SECONDS_OF_PRODUCTS
    for rows in (1, 128, 32, 8, 512, 64, 16):
        for form in _FORMS:
            for name in _NAMES:
                if time.monotonic() < until:
                    _time(card, found, model, (form, name, rows), (x.address, y.address), best)
                else:
                    print(f"{form.name} {name} {rows}: out of time", flush=True)
    x.close()
    y.close()
    _time_steps(card, found, model, best)
    assert not found.get("other_bits"), found["other_bits"]


def _time(
    card: Any, found: Findings, model: Model, what: tuple[Form, str, int],
    buffers: tuple[int, int], best: _Way,
) -> None:  # fmt: skip
    """Time one product; tiles with the shipped number of ranges have the same bits."""
    form, name, rows = what
    make = _Launches(
        card.kernel, card.device.properties, QWEN3_8B, model.stored(card, form), model.pool,
        AttentionShape(),
    )  # fmt: skip
    matrices = [getattr(layer, name) for layer in make.weights.layers]
    matrices = matrices[: _FEW_MATRICES if rows > 128 else len(matrices)]
    shipped = (num_ranges(matrices[0]), _shipped(rows, name, matrices[0]))
    ways = [shipped]
    ways += _others(rows, name, form)
    timed: list[tuple[float, int, Tile]] = []
    wanted: dict[int, np.ndarray] = {}
    outputs = matrices[0].num_outputs // (2 if name == "gate_up" else 1)
    for ranges, tile in dict.fromkeys(ways):
        make.way = _Way("", ranges={(form, name): ranges})
        try:
            launches = [_launch(make, name, one, rows, tile, buffers) for one in matrices]
            if not card.is_real:
                continue
            card.device.fill(buffers[1], 0xFF, rows * outputs * 2, card.stream)
            launches[0](card.stream)
            values = card.floats(buffers[1], rows * outputs)
            spent = card.graph_milliseconds(launches, 2) / len(launches)
        except Exception as error:
            print(f"{what} {tile_name(tile)}: {error!r}"[:160], flush=True)
            continue
        if not np.array_equal(wanted.setdefault(ranges, values), values):
            found.setdefault("other_bits", []).append(f"{what} r{ranges} {tile_name(tile)}")
        timed.append((round(1e3 * spent, 1), ranges, tile))
    if timed:
        _keep(found, what, timed, shipped, best)


def _keep(
    found: Findings, what: tuple[Form, str, int], timed: list[tuple[float, int, Tile]],
    shipped: tuple[int, Tile], best: _Way,
) -> None:  # fmt: skip
    """Print the shipped tile and the fastest; remember the fastest."""
    form, name, rows = what
    lines = {
        (ranges, tile): f"{us} r{ranges} {tile_name(tile)} p{tile.prefetch}"
        for us, ranges, tile in timed
    }
    fastest = sorted(timed, key=lambda one: one[0])
    found.setdefault("all_forms", {})[f"{form.name} {name} {rows}"] = [
        lines[ranges, tile] for _, ranges, tile in fastest
    ]
    best.tiles[what] = next(tile for _, ranges, tile in fastest if ranges == shipped[0])
    print(
        f"{form.name} {name} {rows}: shipped {lines.get(shipped)} | "
        f"{[lines[ranges, tile] for _, ranges, tile in fastest[:4]]}", flush=True,
    )  # fmt: skip


def _time_steps(card: Any, found: Findings, model: Model, best: _Way) -> None:
    """Time whole steps."""
    until = time.monotonic() + _SECONDS_OF_STEPS
    results = found.setdefault("steps", {})
    for count in (1, 8, 32, 64, 128):
        for form in Form:
            ways = [_Way("shipped")] if form is Form.BF16 else [_Way("shipped"), best]
            line = {}
            for way in ways:
                if time.monotonic() < until:
                    line[way.label] = _step_ms(card, model, form, count, way)
            if card.is_real and line:
                results[f"{form.name} {count}"] = line
                print(f"step {form.name} {count}: {line}", flush=True)


def _step_ms(card: Any, model: Model, form: Form, count: int, way: _Way) -> float:
    make = _Launches(
        card.kernel, card.device.properties, QWEN3_8B, model.stored(card, form), model.pool,
        AttentionShape(), choose_product=way.tile, choose_gate_up=way.tile,
    )  # fmt: skip
    make.way = way
    step = started_step(card, make, count, CONTEXT)
    try:
        if not card.is_real:
            return 1.0
        step.capture()
        return round(float(card.milliseconds(step.run, 12, 3)), 3)
    finally:
        step.close()
