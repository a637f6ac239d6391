"""Whole bfloat16 steps in other shapes of attention and other tiles, one change after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.runner.gpu.launches import AttentionShape
from engine.runner.gpu.tiles import Tile, gate_up_tile, product_tile
from engine.runner.gpu.weights import Matrix
from tests.gpu.stages.model import CONTEXT, Findings, Model, rows_and_results, tile_name
from tests.gpu.stages.products import _product_launches, _split_launches
from tests.gpu.stages.steps import started_step

_SECONDS = 56.0


@dataclass(frozen=True)
class _Shape:
    """What a step is made of; 0 leaves a tile's own prefetch."""

    attention: AttentionShape
    prefetch: int = 0
    gate_prefetch: int = 0
    tiles: tuple[tuple[str, Tile], ...] = ()

    def product(self, num_rows: int, num_outputs: int, weights: Matrix) -> Tile:
        tile = dict(self.tiles).get(f"{num_outputs}x{weights.num_inputs}")
        tile = tile or product_tile(num_rows, num_outputs, weights)
        return replace(tile, prefetch=self.prefetch) if self.prefetch and tile.prefetch else tile

    def gate_up(self, num_rows: int, num_outputs: int, weights: Matrix) -> Tile:
        tile = dict(self.tiles).get("gate_up") or gate_up_tile(num_rows, num_outputs, weights)
        is_changed = self.gate_prefetch and tile.prefetch
        return replace(tile, prefetch=self.gate_prefetch) if is_changed else tile


def _attention(best: _Shape, count: int) -> Iterator[tuple[str, _Shape]]:
    is_merged = best.attention.is_merged_by_last
    for programs, stages, warps in (
        (132, 5, 4), (132, 7, 4), (264, 3, 4), (264, 4, 4), (264, 5, 4), (396, 3, 4), (396, 2, 4),
        (528, 2, 4), (264, 3, 8), (132, 5, 8),
    ):  # fmt: skip
        shape = AttentionShape(
            programs=programs, stages=stages, num_warps=warps, is_merged_by_last=is_merged
        )
        yield f"attention p{programs} s{stages} w{warps}", replace(best, attention=shape)


def _merged(best: _Shape, count: int) -> Iterator[tuple[str, _Shape]]:
    shape = replace(best.attention, is_merged_by_last=not best.attention.is_merged_by_last)
    yield f"merged by the last {shape.is_merged_by_last}", replace(best, attention=shape)


def _prefetches(best: _Shape, count: int) -> Iterator[tuple[str, _Shape]]:
    if count <= 16:
        for columns in (128, 1024, 2048, 4096):
            yield f"prefetch {columns}", replace(best, prefetch=columns)


def _gate_prefetches(best: _Shape, count: int) -> Iterator[tuple[str, _Shape]]:
    if count <= 16:
        for columns in (128, 256, 1024, 2048):
            yield f"gate prefetch {columns}", replace(best, gate_prefetch=columns)


def _tiles(best: _Shape, count: int) -> Iterator[tuple[str, _Shape]]:
    described: dict[int, tuple[tuple[str, Tile], ...]] = {
        32: (
            ("4096x4096", Tile(32, 32, 256, 4, 4, prefetch=512)),
            ("4096x12288", Tile(32, 32, 256, 4, 4, prefetch=512)),
            ("6144x4096", Tile(32, 64, 128, 4, 6, is_described=True)),
            ("gate_up", Tile(32, 64, 128, 4, 3, is_described=True)),
        ),
        128: (
            ("4096x4096", Tile(128, 64, 128, 4, 4, is_described=True)),
            ("4096x4096", Tile(128, 32, 128, 4, 4, prefetch=256)),
            ("4096x12288", Tile(128, 64, 128, 4, 4, is_described=True)),
            ("6144x4096", Tile(64, 64, 128, 4, 6, is_described=True)),
            ("gate_up", Tile(128, 64, 64, 4, 6, is_described=True)),
            ("gate_up", Tile(128, 128, 64, 8, 4, is_described=True)),
        ),
    }
    for name, tile in described.get(count, ()):
        yield f"{name} {tile_name(tile)}", replace(best, tiles=(*best.tiles, (name, tile)))


_AXES: tuple[Callable[[_Shape, int], Iterator[tuple[str, _Shape]]], ...] = (
    _attention, _merged, _prefetches, _gate_prefetches, _tiles,
)  # fmt: skip


def step_forms(card: Any, found: Findings) -> None:
    """Change one thing of a step after the other, and keep what makes it faster."""
    model = Model.of(card)
    results = found.setdefault("step_forms", {})
    for count in (1, 128, 32, 8):
        until = time.monotonic() + _SECONDS / 4
        best = _Shape(AttentionShape())
        fastest = _milliseconds(card, model, count, best)
        rows = [("shipped", fastest)]
        for axis in _AXES:
            options = list(axis(best, count))
            for label, shape in options:
                if time.monotonic() > until:
                    break
                try:
                    spent = _milliseconds(card, model, count, shape)
                except Exception as error:
                    print(f"{count} {label}: {error!r}"[:160], flush=True)
                    continue
                rows.append((label, spent))
                if spent < 0.998 * fastest:
                    best, fastest = shape, spent
        if card.is_real:
            results[f"{count}"] = rows
            print(f"step of {count}: {fastest:.3f} ms of {rows[0][1]:.3f}: {best}", flush=True)
            print("   " + ", ".join(f"{label}: {ms:.3f}" for label, ms in rows), flush=True)
    _divided(card, model, found)


def _milliseconds(card: Any, model: Model, count: int, shape: _Shape) -> float:
    make = model.launches(
        card, shape.attention, choose_product=shape.product, choose_gate_up=shape.gate_up
    )
    step = started_step(card, make, count, CONTEXT)
    try:
        if not card.is_real:
            return 1.0
        step.capture()
        return float(card.milliseconds(step.run, 6 if count > 32 else 10, 3))
    finally:
        step.close()


def _divided(card: Any, model: Model, found: Findings) -> None:
    """Products of 128 rows beside the same with K divided among programs (without its sums)."""
    x, y = rows_and_results(card)
    make = model.launches(card)
    for name in ("output", "down", "qkv"):
        matrices = [getattr(layer, name) for layer in model.weights.layers]
        tile = product_tile(128, matrices[0].num_outputs, matrices[0])
        own = _product_launches(make, name, 128, (x.address, y.address), tile)
        timed = []
        for label, launches in _split_launches(card, matrices, x.address, y.address, 128):
            if card.is_real:
                timed.append((round(card.graph_milliseconds(launches, 3) * 1e3 / 36, 1), label))
        if card.is_real:
            spent = round(card.graph_milliseconds(own, 3) * 1e3 / 36, 1)
            found.setdefault("divided", {})[name] = {"own": spent, "divided": sorted(timed)[:4]}
            print(f"{name} of 128 rows: {found['divided'][name]}", flush=True)
    x.close()
    y.close()
