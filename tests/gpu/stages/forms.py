"""Candidates for products of quantised weights: their bits, their times, and whole steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.runner.gpu.weights import Form, Matrix
from tests.gpu.ranged import MOST_ROWS, Ranged, RangedLaunches
from tests.gpu.stages.bits import exact_rows
from tests.gpu.stages.model import CONTEXT, QWEN3_8B, Chosen, Findings, Model, rows_and_results
from tests.gpu.stages.steps import started_step, time_step

_NAMES = ("qkv", "output", "gate_up", "down")
_FORMS = (Form.INT4, Form.FP8)
_RANGES = (4, 8, 2)
_MOST_SHARED = 222 << 10
_MOST_MILLISECONDS = 5.0
_SECONDS = 90.0
"""The stage measures no further candidate after so long."""

_PHASES: tuple[tuple[int, ...], ...] = ((1, 8), (32,), (128,))


def _ways(rows: int, is_gated: bool) -> Iterator[Ranged]:
    """Candidates for `rows` rows; what has not run on a card before comes last."""
    for ranges in _RANGES:
        if ranges == 2 and not is_gated:
            continue
        if rows <= 8:
            for outputs, warps, stages, unrolled in (
                (16, ranges, 3, 1), (16, ranges, 4, 1), (16, ranges, 6, 1), (16, ranges, 3, 2),
                (16, ranges, 4, 2), (16, ranges // 2, 4, 1), (32, ranges, 3, 1),
                (32, ranges, 4, 1),
            ):  # fmt: skip
                if not (ranges == 8 and is_gated and outputs * unrolled > 16):
                    yield Ranged("together", 8, outputs, ranges, warps, stages, unrolled)
        elif rows <= 32:
            yield Ranged("together", 32, 16, ranges, ranges, 3)
            if not is_gated:
                yield Ranged("together", 32, 32, ranges, ranges, 3)
            for stages in (4, 6):
                yield Ranged("apart", 32, 64, ranges, 4, stages)
        else:
            yield Ranged("in_turn", 64, 64, ranges, 4, 3)
            if not is_gated:
                yield Ranged("in_turn", 128, 64, ranges, 8, 3)
            if not (is_gated and ranges == 8):  # these spill
                yield Ranged("apart", 64, 64, ranges, 4, 4)
                yield Ranged("apart", 128, 64, ranges, 8, 3)


def _held(way: Ranged, form: Form, width: int) -> int:
    """Return the bytes of shared memory that a program's stages take."""
    groups = way.ranges if way.how == "together" else 1
    weights = way.outputs * (128 if form is Form.FP8 else 64)
    if way.how == "together":
        weights *= width
    return groups * way.unrolled * (weights + 256 * way.rows) * (way.stages - 1)


class _Ways:
    """The candidates' launches and what was found about them."""

    def __init__(self, card: Any, model: Model, found: Findings) -> None:
        self.card, self.model = card, model
        self.results = found.setdefault("all_forms", {})
        self.best: dict[tuple[Form, str, int, int], tuple[float, Ranged]] = {}
        """By form, product, rows and ranges."""
        self.ranges: dict[tuple[Form, str], int] = {}
        partials = card.device.allocate(2 * 8 * MOST_ROWS * 12288 * 4)
        counters = card.device.allocate(1 << 16)
        if card.is_real:
            card.device.fill(counters.address, 0, 1 << 16, card.stream)
        self.scratch = (partials.address, counters.address)
        self.x, self.y = (memory.address for memory in rows_and_results(card))
        self.until = time.monotonic() + _SECONDS
        self._makes: dict[Form, RangedLaunches] = {}
        self._references: dict[tuple[Form, str, int], np.ndarray] = {}

    def make(self, form: Form, count: int | None = None) -> RangedLaunches:
        """Return launches; with `count`, those of a step of so many rows in the best ways."""
        if count is None and form in self._makes:
            return self._makes[form]
        card, model = self.card, self.model
        made = RangedLaunches(
            card.kernel, card.device.properties, QWEN3_8B, model.stored(card, form), model.pool,
            Chosen.shape(count or 1), scratch=self.scratch, choose=self.chosen,
        )  # fmt: skip
        if count is None:
            self._makes[form] = made
        return made

    def chosen(self, rows: int, weights: Matrix, is_gated: bool) -> Ranged | None:
        """Return the best way for a product of the model, if one was found."""
        shapes = {
            (6144, 4096): "qkv", (4096, 4096): "output", (4096, 12288): "down",
            (24576, 4096): "gate_up",
        }  # fmt: skip
        name = shapes.get((weights.num_outputs, weights.num_inputs))
        if name is None or (weights.form, name) not in self.ranges:
            return None
        found = self.best.get((weights.form, name, rows, self.ranges[weights.form, name]))
        return found[1] if found else None

    def launches(self, form: Form, name: str, rows: int, way: Ranged) -> list[Any]:
        """Return the product of every layer."""
        make = self.make(form)
        is_gated = name == "gate_up"
        residual = self.x if name in ("output", "down") else 0
        return [
            make.ranged(way, self.x, getattr(layer, name), self.y, rows, residual, is_gated)
            for layer in make.weights.layers
        ]

    def outputs(self, form: Form, name: str, rows: int, way: Ranged) -> np.ndarray:
        """Return the first layer's results, [rows, outputs]."""
        launch = self.launches(form, name, rows, way)[0]
        weights = getattr(self.make(form).weights.layers[0], name)
        outputs = weights.num_outputs // (2 if name == "gate_up" else 1)
        card = self.card
        if not card.is_real:
            return np.zeros((1, 1))
        card.device.fill(self.y, 0xFF, rows * outputs * 2, card.stream)
        launch(card.stream)
        values: np.ndarray = card.floats(self.y, rows * outputs).reshape(rows, outputs)
        return values

    def is_same(self, form: Form, name: str, way: Ranged) -> bool:
        """Whether a way gives the bits of range after range without PTX, alone and among rows."""
        key = (form, name, way.ranges)
        if key not in self._references:
            plain = Ranged("in_turn", 64, 64, way.ranges, 4, 3, has_ptx=False)
            self._references[key] = self.outputs(form, name, MOST_ROWS, plain)
            if name == "qkv" and self.card.is_real:
                self._check(form, self._references[key][0])
        wanted = self._references[key]
        among = self.outputs(form, name, MOST_ROWS, way)
        alone = self.outputs(form, name, 1, way)
        return bool(
            np.isfinite(wanted).all()
            and np.array_equal(among, wanted)
            and np.array_equal(alone, wanted[:1])
        )

    def _check(self, form: Form, row: np.ndarray) -> None:
        """Print how far the first outputs of the first row are from float64's."""
        weights = self.make(form).weights.layers[0].qkv
        exact = exact_rows(self.card, weights, 64) @ self.card.floats(self.x, weights.num_inputs)
        error = np.linalg.norm(row[:64] - exact) / np.linalg.norm(exact)
        print(f"{form.name}: error {error:.2e}, wanted below 4e-3", flush=True)

    def try_one(self, form: Form, name: str, rows: int, way: Ranged) -> None:
        """Time a way and check its bits."""
        launches = self.launches(form, name, rows, way)
        is_same = self.is_same(form, name, way)
        if not self.card.is_real:
            return
        one = self.card.milliseconds(lambda: launches[0](self.card.stream), 1, 1)
        spent = one if one > _MOST_MILLISECONDS else (
            self.card.graph_milliseconds(launches, 3) / len(launches)
        )  # fmt: skip
        us = round(1e3 * spent, 2)
        label = f"{form.name} {name} {rows}"
        self.results.setdefault(label, []).append([us, str(way), is_same])
        key = (form, name, rows, way.ranges)
        if not is_same:
            print(f"{label} {way}: other bits", flush=True)
        elif key not in self.best or spent < self.best[key][0]:
            self.best[key] = (spent, way)

    def sweep(self, form: Form, name: str, rows: int) -> None:
        """Try all candidates of a product, and print the best of each number of ranges."""
        weights = getattr(self.make(form).weights.layers[0], name)
        width = 2 if name == "gate_up" else 1
        fixed = self.ranges.get((form, name))
        for way in _ways(rows, width == 2):
            is_wanted = fixed in (None, way.ranges) and way.fits(weights.num_inputs)
            if not is_wanted or _held(way, form, width) > _MOST_SHARED:
                continue
            if time.monotonic() > self.until:
                print(f"{form.name} {name} {rows}: out of time", flush=True)
                return
            try:
                self.try_one(form, name, rows, way)
            except Exception as error:
                print(f"{form.name} {name} {rows} {way}: {error!r}"[:200], flush=True)
        for ranges in _RANGES:
            if (form, name, rows, ranges) in self.best:
                spent, way = self.best[form, name, rows, ranges]
                rate = weights.num_bytes / spent / 1e6
                print(f"{form.name} {name} {rows}: {1e3 * spent:.1f} us {rate:.0f} GB/s {way}",
                      flush=True)  # fmt: skip

    def fix_ranges(self, form: Form, rows: tuple[int, ...]) -> None:
        """Choose each product's number of ranges by the times with these numbers of rows."""
        for name in _NAMES:
            sums = {
                ranges: sum(self.best[form, name, count, ranges][0] for count in rows)
                for ranges in _RANGES
                if all((form, name, count, ranges) in self.best for count in rows)
            }
            if sums:
                self.ranges[form, name] = min(sums, key=lambda ranges: sums[ranges])


def quantised_forms(card: Any, found: Findings) -> None:
    """Every candidate for every product and number of rows, and steps in the best ones."""
    model = Model.of(card)
    ways = _Ways(card, model, found)
    winners = found.setdefault("forms", {})
    for phase in _PHASES:
        for count in phase:
            plain = started_step(card, model.launches(card, Chosen.shape(count)), count, CONTEXT)
            if card.is_real:
                time_step(card, found, plain, model.weights, f"{count}")
            plain.close()
        for form in _FORMS:
            for count in phase:
                for name in _NAMES:
                    ways.sweep(form, name, count)
            if card.is_real and phase is _PHASES[0]:
                ways.fix_ranges(form, phase)
            for count in phase:
                _time_form(card, found, ways, form, count)
    for (form, name), ranges in ways.ranges.items():
        for count in (1, 8, 32, 128):
            if (form, name, count, ranges) in ways.best:
                spent, way = ways.best[form, name, count, ranges]
                winners[f"{form.name} {name} {count}"] = [round(1e3 * spent, 2), str(way)]


def _time_form(card: Any, found: Findings, ways: _Ways, form: Form, count: int) -> None:
    """Time a step in the best ways beside the same in bfloat16."""
    step = started_step(card, ways.make(form, count), count, CONTEXT)
    if card.is_real:
        weights = ways.model.stored(card, form)
        spent = time_step(card, found, step, weights, f"{count} {form.name}")
        print(f"  {found['step'][f'{count}']['ms'] / spent:.2f} of bfloat16's speed", flush=True)
    step.close()
