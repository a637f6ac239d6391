"""Whole bfloat16 steps in other shapes of attention and other tiles, one change after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.runner.gpu.launches import AttentionShape
from engine.runner.gpu.tiles import Tile, gate_up_tile, product_tile
from engine.runner.gpu.weights import Matrix
from tests.gpu.stages.model import CONTEXT, Findings, Model, tile_name
from tests.gpu.stages.steps import started_step

_SECONDS = 16.0


@dataclass(frozen=True)
class _Shape:
    """What a step is made of; without a tile, the one that is shipped."""

    attention: AttentionShape
    tiles: tuple[tuple[str, Tile], ...] = ()

    def product(self, num_rows: int, num_outputs: int, weights: Matrix) -> Tile:
        tile = dict(self.tiles).get(f"{num_outputs}x{weights.num_inputs}")
        return tile or product_tile(num_rows, num_outputs, weights)

    def gate_up(self, num_rows: int, num_outputs: int, weights: Matrix) -> Tile:
        tile = dict(self.tiles).get("gate_up")
        return tile or gate_up_tile(num_rows, num_outputs, weights)


_TILES: dict[int, tuple[tuple[str, Tile], ...]] = {
    1: (
        ("gate_up", Tile(16, 64, 128, 4, 4, prefetch=256)),
        ("gate_up", Tile(16, 32, 256, 4, 4, prefetch=256)),
        ("gate_up", Tile(16, 16, 256, 4, 6, prefetch=256)),
        ("6144x4096", Tile(16, 16, 256, 4, 6, prefetch=1024)),
        ("4096x4096", Tile(16, 16, 256, 4, 4, prefetch=1024)),
        ("4096x12288", Tile(16, 16, 512, 4, 4, prefetch=512)),
        ("151936x4096", Tile(16, 32, 256, 4, 4, prefetch=512)),
        ("151936x4096", Tile(16, 64, 128, 4, 6, prefetch=512)),
    ),
    128: (("gate_up", Tile(128, 128, 64, 8, 4, is_described=True)),),
}


def _options(best: _Shape, count: int) -> Iterator[tuple[str, _Shape]]:
    """Yield what may be faster; shapes of attention first."""
    for programs, stages in ((132, 7), (66, 7), (396, 3)) if count <= 4 else ((264, 5), (396, 3)):
        shape = AttentionShape(
            programs=programs, few_programs=programs, stages=stages, few_stages=stages
        )
        yield f"attention p{programs} s{stages}", replace(best, attention=shape)
    for name, tile in _TILES.get(count, ()):
        yield f"{name} {tile_name(tile)} p{tile.prefetch}", replace(best, tiles=((name, tile),))


def step_forms(card: Any, found: Findings) -> None:
    """Time steps with one thing changed, and print each."""
    model = Model.of(card)
    results = found.setdefault("step_forms", {})
    until = time.monotonic() + _SECONDS
    for count in (1, 4, 128):
        shipped = _Shape(AttentionShape())
        rows = [("shipped", _milliseconds(card, model, count, shipped))]
        for label, shape in _options(shipped, count):
            if time.monotonic() > until:
                break
            rows.append((label, _milliseconds(card, model, count, shape)))
        if card.is_real:
            results[f"{count}"] = rows
            print(f"step of {count}: " + ", ".join(f"{label}: {ms:.3f}" for label, ms in rows),
                  flush=True)  # fmt: skip


def _milliseconds(card: Any, model: Model, count: int, shape: _Shape) -> float:
    make = model.launches(
        card, shape.attention, choose_product=shape.product, choose_gate_up=shape.gate_up
    )
    step = started_step(card, make, count, CONTEXT)
    try:
        if not card.is_real:
            return 1.0
        step.capture()
        return float(card.milliseconds(step.run, 8, 3))
    finally:
        step.close()
