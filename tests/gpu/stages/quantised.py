"""Products of quantised weights: the bits of every tile that is shipped, and whole steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from engine.runner.gpu.launches import Bound, Launches
from engine.runner.gpu.tiles import Tile, gate_up_tile, product_tile
from engine.runner.gpu.weights import Form, Matrix
from tests.gpu.stages.bits import MOST_ERROR, exact_rows
from tests.gpu.stages.ceilings import read_gb_s
from tests.gpu.stages.model import (
    CONTEXT,
    Findings,
    Model,
    rows_and_results,
    tile_name,
)
from tests.gpu.stages.steps import started_step, time_step

_NAMES = ("qkv", "output", "gate_up", "down")
_FORMS = (Form.INT4, Form.FP8, Form.Q4_0, Form.Q8_0)
_BUCKETS = (700, 128, 64, 32, 16, 8, 1)
_SECONDS_OF_BITS = 24.0


def quantised(card: Any, found: Findings) -> None:
    """Bits of the tiles that are shipped, and steps in them."""
    model = Model.of(card)
    x, y = rows_and_results(card)
    buffers = (x.address, y.address)
    for form in _FORMS:
        _check_bits(card, found, model, form, buffers)
    read_gb_s(card, found)
    for count in (1, 8, 32, 128):
        plain = _step_ms(card, found, model, Form.BF16, count)
        for form in _FORMS:
            spent = _step_ms(card, found, model, form, count)
            if card.is_real:
                times = round(plain / spent, 3)
                found["step"][f"{count} {form.name}"]["times the speed of bfloat16"] = times
                print(f"step of {count} {form.name}: {times} times bfloat16's", flush=True)
    x.close()
    y.close()
    differing = [f"{form.name}: {found[f'bits_{form.name}']}" for form in _FORMS]
    assert all(line.endswith(": equal") for line in differing), differing


def _step_ms(card: Any, found: Findings, model: Model, form: Form, count: int) -> float:
    """Time a step in the tiles that are shipped."""
    step = started_step(card, model.launches(card, form=form), count, CONTEXT)
    try:
        if not card.is_real:
            return 1.0
        return time_step(card, found, step, model.stored(card, form), f"{count} {form.name}")
    finally:
        step.close()


def _chosen(rows: int, name: str, weights: Matrix) -> Tile:
    if name == "gate_up":
        return gate_up_tile(rows, weights.num_outputs // 2, weights)
    return product_tile(rows, weights.num_outputs, weights)


def _launch(
    make: Launches, name: str, weights: Matrix, rows: int, tile: Tile, buffers: tuple[int, int]
) -> Bound:
    if name == "gate_up":
        return make.gate_up(buffers[0], weights, buffers[1], rows, tile)
    return make.product(buffers[0], weights, buffers[1], rows, tile=tile)


def _check_bits(
    card: Any, found: Findings, model: Model, form: Form, buffers: tuple[int, int]
) -> None:
    """Compare each bucket's tile, on many rows and on its own number, without a residual."""
    make = model.launches(card, form=form)
    differing: list[str] = []
    until = time.monotonic() + _SECONDS_OF_BITS / len(_FORMS)
    for name in _NAMES:
        weights = getattr(make.weights.layers[0], name)
        wanted = None
        for bucket in _BUCKETS:
            if time.monotonic() > until:
                differing.append(f"{form.name} {name} {bucket}: out of time")
                break
            tile = _chosen(bucket, name, weights)
            for rows in dict.fromkeys((bucket, 128, 1)):
                launch = _launch(make, name, weights, rows, tile, buffers)
                if not card.is_real:
                    continue
                values = _results(card, launch, buffers[1], rows, name, weights)
                if wanted is None:
                    wanted = values
                    if name == "qkv":
                        exact = exact_rows(card, weights, 64) @ card.floats(
                            buffers[0], weights.num_inputs
                        )
                        error = np.linalg.norm(values[0, :64] - exact) / np.linalg.norm(exact)
                        found[f"error_{form.name}"] = float(f"{error:.3g}")
                        assert error < MOST_ERROR, error
                    again = _results(card, launch, buffers[1], rows, name, weights)
                    _report(differing, f"{form.name} {name} itself again", again, values)
                    continue
                label = f"{form.name} {name} {rows} rows, {tile_name(tile)}"
                _report(differing, label, values, wanted[:rows])
    found[f"bits_{form.name}"] = differing or "equal"
    print(form.name, "products:", found[f"bits_{form.name}"], flush=True)


def _results(card: Any, launch: Bound, y: int, rows: int, name: str, weights: Matrix) -> np.ndarray:
    outputs = weights.num_outputs // (2 if name == "gate_up" else 1)
    card.device.fill(y, 0xFF, rows * outputs * 2, card.stream)
    launch(card.stream)
    values: np.ndarray = card.floats(y, rows * outputs).reshape(rows, outputs)
    return values


def _report(differing: list[str], label: str, values: np.ndarray, wanted: np.ndarray) -> None:
    """Keep how results differ: how many, the first one, by how much, and how many are NaN."""
    if np.array_equal(values, wanted):
        return
    places = np.argwhere(values != wanted)
    first = tuple(int(place) for place in places[0])
    gap = np.abs(values - wanted) / np.maximum(np.abs(wanted), 1e-30)
    line = (
        f"{label}: {len(places)} of {values.size} differ, first {first} {values[first]!r} for "
        f"{wanted[first]!r}, most by {np.nanmax(gap):.3g}; NaN {np.isnan(values).sum()} and "
        f"{np.isnan(wanted).sum()}"
    )
    differing.append(line)
    print(line, flush=True)
