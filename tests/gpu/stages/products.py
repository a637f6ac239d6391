"""The products of a step, in the tiles that are shipped and in others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import Launches
from engine.runner.gpu.tiles import Tile, gate_up_tile, product_tile
from engine.runner.gpu.weights import Matrix
from tests.gpu.kernels import split_product
from tests.gpu.stages.model import (
    Findings,
    Model,
    rows_and_results,
    tile_name,
)

_MOST_SHARED = 224 << 10
_SPLIT_TYPES = {"x": "*bf16", "weights": "*bf16", "y": "*fp32", "num_rows": "i32"}
_SPLIT_TILES = (
    (16, 16, 256, 4, 6), (16, 16, 256, 2, 4), (16, 64, 128, 4, 4), (16, 32, 128, 4, 4),
)  # fmt: skip
_SPLIT_WIDE = ((32, 64, 128, 4, 4), (64, 64, 128, 4, 3), (64, 64, 64, 4, 4), (128, 64, 64, 4, 4),
               (128, 128, 64, 8, 4))  # fmt: skip


def _held(tile: Tile, width: int) -> int:
    """Return the bytes of shared memory that a tile's stages take."""
    return 2 * (width * tile.outputs + tile.rows) * tile.depth * tile.stages


def _tiles(rows: int, width: int) -> Iterator[Tile]:
    """Candidates for a product of `rows` rows; `width` 2 where a program has two accumulators."""
    if rows == 1:
        candidates = [
            Tile(16, outputs, depth, warps, stages, prefetch=512)
            for outputs, depth, warps, stages in (
                (16, 256, 4, 4), (16, 256, 4, 6), (16, 256, 4, 8), (16, 256, 2, 4), (16, 512, 4, 3),
                (16, 512, 4, 4), (16, 128, 2, 6), (32, 128, 4, 6), (32, 256, 4, 4), (64, 128, 4, 4),
            )
        ]  # fmt: skip
    elif rows < 4096:
        candidates = [
            Tile(tile_rows, outputs, depth, warps, stages, 0 if tma else 256, tma)
            for tile_rows in {min(rows, 32), min(rows, 64), rows}
            for outputs, warps in ((32, 4), (64, 4), (128, 4))
            for depth, stages in ((128, 3), (128, 4), (128, 6), (128, 8), (64, 4), (64, 8))
            for tma in (False, True)
            if not (outputs == 32 and (tile_rows > 32 or tma))
        ]
    else:
        candidates = [
            Tile(rows_each, outputs, depth, 8, stages, is_described=True)
            for rows_each, outputs, depth, stages in (
                (256, 128, 64, 3), (256, 128, 64, 4), (128, 256, 64, 4), (128, 128, 64, 4),
                (128, 128, 64, 3), (128, 128, 128, 3),
            )
        ]  # fmt: skip
    for tile in candidates:
        is_small_enough = tile.rows * tile.outputs * width <= (1 << 15) * (tile.num_warps // 4 or 1)
        if _held(tile, width) <= _MOST_SHARED and is_small_enough:
            yield tile


_NAMES = ("qkv", "output", "gate_up", "down", "head")


def _product_launches(
    make: Launches, name: str, rows: int, buffers: tuple[int, int], tile: Tile
) -> list[Callable[[int], None]]:
    x, y = buffers
    layers = make.weights.layers
    if name == "gate_up":
        return [make.gate_up(x, layer.gate_up, y, rows, tile) for layer in layers]
    if name == "head":
        return [make.product(x, make.weights.head, y, rows, is_float=True, tile=tile)]
    residual = y if name != "qkv" else 0
    return [
        make.product(x, getattr(layer, name), y, rows, residual=residual, tile=tile)
        for layer in layers
    ]


def products(card: Any, found: Findings) -> None:
    """Every product of a step, each layer with its own weights, in the tile that is shipped."""
    model = Model.of(card)
    x, y = rows_and_results(card)
    make = model.launches(card)
    for rows in (1, 32, 64, 128, 512, 4096):
        for name in _NAMES:
            if name == "head" and rows > 128:
                continue
            weights = make.weights.head if name == "head" else getattr(make.weights.layers[0], name)
            if name == "gate_up":
                tile = gate_up_tile(rows, weights.num_outputs // 2, weights)
            else:
                tile = product_tile(rows, weights.num_outputs, weights)
            launches = _product_launches(make, name, rows, (x.address, y.address), tile)
            if card.is_real:
                repeats = 1 if rows == 4096 else 3
                spent = card.graph_milliseconds(launches, repeats) / len(launches)
                _keep(found, name, rows, weights, [(spent, tile)])
    x.close()
    y.close()


def sweep(card: Any, found: Findings) -> None:
    """The fastest tile of every product. Not run unless it is named."""
    model = Model.of(card)
    x, y = rows_and_results(card)
    make = model.launches(card)
    for rows in (1, 32, 128, 4096):
        for name in _NAMES:
            if name == "head" and rows == 4096:
                continue
            timed = []
            for tile in _tiles(rows, 2 if name == "gate_up" else 1):
                try:
                    launches = _product_launches(make, name, rows, (x.address, y.address), tile)
                    if not card.is_real:
                        continue
                    repeats = 1 if rows == 4096 else 3
                    spent = card.graph_milliseconds(launches, repeats) / len(launches)
                except Exception as error:
                    print(f"{name} {rows} {tile_name(tile)}: {error!r}"[:160], flush=True)
                    continue
                timed.append((spent, tile))
            if timed:
                timed.sort(key=lambda item: item[0])
                weights = (
                    make.weights.head if name == "head" else getattr(make.weights.layers[0], name)
                )
                _keep(found, name, rows, weights, timed)
    x.close()
    y.close()


def _keep(
    found: Findings, name: str, rows: int, weights: Matrix, timed: list[tuple[float, Tile]]
) -> None:
    """Keep all times, and print those of the first four."""
    spent, tile = timed[0]
    flops = 2 * rows * weights.num_outputs * weights.num_inputs
    label = f"{name} {rows} {weights.form.name}"
    found.setdefault("products", {})[label] = {
        "us": round(1e3 * spent, 2), "gb_s": round(weights.num_bytes / spent / 1e6),
        "tflops": round(flops / spent / 1e9, 1), "tile": tile_name(tile),
    }  # fmt: skip
    found.setdefault("all_products", {})[label] = [
        (round(1e3 * ms, 2), tile_name(other)) for ms, other in timed
    ]
    others = [f"{1e3 * ms:.1f} {tile_name(other)}" for ms, other in timed[1:4]]
    print(f"{label:18s} {list(found['products'][label].values())} {others}", flush=True)


def price(card: Any, found: Findings) -> None:
    """Products whose K is divided, in whatever way is fastest, beside ours."""
    if "products" not in found:
        products(card, found)
    model = Model.of(card)
    x, y = rows_and_results(card)
    layers = model.weights.layers
    results = found.setdefault("price", {})
    for rows in (1, 32, 128):
        ours = fastest = 0.0
        for name in ("qkv", "output", "gate_up", "down"):
            matrices = [getattr(layer, name) for layer in layers]
            timed = []
            for label, launches in _split_launches(card, matrices, x.address, y.address, rows):
                if card.is_real:
                    timed.append((card.graph_milliseconds(launches, 3) * 1e3 / 36, label))
            if timed and f"{name} {rows} BF16" in found.get("products", {}):
                own = found["products"][f"{name} {rows} BF16"]["us"]
                best = min(timed)
                results[f"{name} {rows}"] = {
                    "ours_us": own,
                    "divided_us": round(best[0], 2),
                    "how": best[1],
                }
                ours, fastest = ours + own, fastest + min(own, best[0])
        if fastest:
            results[f"{rows}"] = round(ours / fastest - 1, 4)
            print(f"price at {rows} rows: {results}", flush=True)
    x.close()
    y.close()


def _split_launches(
    card: Any, matrices: list[Matrix], x: int, y: int, num_rows: int
) -> list[tuple[str, list[Callable[[int], None]]]]:
    """Return, for each way to divide K, the launches of one product in every layer."""
    found = []
    for tile in _SPLIT_TILES if num_rows <= 16 else _SPLIT_WIDE:
        rows, outputs, depth, warps, stages = tile
        for parts in (2, 4):
            if rows > max(num_rows, 16) and rows != 32:
                continue
            first = matrices[0]
            spec = KernelSpec(
                split_product, _SPLIT_TYPES,
                {"N": first.num_outputs, "K": first.num_inputs, "BM": rows, "BN": outputs,
                 "BK": depth, "PARTS": parts, "IS_PROGRAMMATIC": True},
                warps, stages, is_programmatic=True,
            )  # fmt: skip
            kernel = card.kernel(spec)
            grid = (first.num_outputs // outputs, -(-num_rows // rows), parts)
            launches = [kernel.bind(grid, x, matrix.address, y, num_rows) for matrix in matrices]
            found.append((f"{parts} parts, {rows}x{outputs}x{depth}", launches))
    return found
