"""The same bits in every tile, among any number of rows, decoded and in chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.runner.gpu.launches import AttentionShape
from engine.runner.gpu.steps.chunk_step import ChunkRow, ChunkStep
from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import Form, Matrix
from tests.gpu.decoding import Decoding
from tests.gpu.stages.model import (
    QWEN3_8B,
    Findings,
    Model,
    rows_and_results,
    tile_name,
)

MOST_ERROR = 4e-3
"""The error of results that are rounded to bfloat16, beside float64."""


def _equal_tiles() -> list[Tile]:
    return [
        Tile(16, 32, 128, 4, 4), Tile(16, 16, 256, 4, 3), Tile(16, 64, 128, 4, 4),
        Tile(32, 32, 64, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 64, 4, 4),
        Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3, is_described=True),
        Tile(256, 128, 64, 8, 3, is_described=True), Tile(16, 64, 128, 4, 4, is_described=True),
    ]  # fmt: skip


def bits(card: Any, found: Findings) -> None:
    """The same row's bits in every tile, among any number of rows, decoded and in chunks."""
    model = Model.of(card)
    make = model.launches(card)
    layer = model.weights.layers[0]
    x, y = rows_and_results(card)
    differing = []
    for name, weights in (("qkv", layer.qkv), ("down", layer.down)):
        outputs, inputs = weights.num_outputs, weights.num_inputs
        reference = None
        for tile in _equal_tiles():
            for rows in (1, 7, 100, 1000, 4096):
                if rows > 100 and tile.rows == 16:
                    continue
                launch = make.product(x.address, weights, y.address, rows, tile=tile)
                if not card.is_real:
                    continue
                card.device.fill(y.address, 0xFF, rows * outputs * 2, card.stream)
                launch(card.stream)
                values = card.floats(y.address, rows * outputs).reshape(rows, outputs)
                if reference is None:
                    reference = values[0]
                    _check_product(
                        card, (x.address, weights.address), values[0], inputs, found, name
                    )
                if not np.array_equal(values[0], reference):
                    gap = np.abs(values[0] - reference).max()
                    differing.append(f"{name} {tile_name(tile)} rows {rows}: {gap:.3g}")
    differing += _stored_forms(card, found, model, (x.address, y.address))
    found["bits_products"] = "; ".join(differing) or "equal"
    print("products:", found["bits_products"], flush=True)
    x.close()
    y.close()
    _steps_agree(card, found, model, "bits_steps")
    # Every second layer: it begins in another piece than the last row's, and within a block.
    windows = (300, 0) * (QWEN3_8B.num_layers // 2)
    _steps_agree(card, found, model, "bits_windows", windows=windows)
    sinks = card.device.allocate(4 * QWEN3_8B.num_heads)
    card.device.upload(sinks.address, np.linspace(-4, 9, QWEN3_8B.num_heads, dtype="f4").tobytes())
    address = sinks.address or 1
    _steps_agree(card, found, model, "bits_sinks", windows=windows, sinks=address)
    sinks.close()
    norms = card.device.allocate(4 * QWEN3_8B.hidden_size)
    card.device.upload(
        norms.address, np.linspace(0.1, 1, QWEN3_8B.hidden_size, dtype="f4").tobytes()
    )
    _steps_agree(card, found, model, "bits_gemma", windows=windows, norms=norms.address or 16)
    norms.close()
    if card.is_real:
        _require_all(found)


def _require_all(found: Findings) -> None:
    """Raise for results that differ, or that are further from float64 than rounding is."""
    assert found["logits_finite"]
    differing = {name: result for name, result in found.items() if name.startswith("bits_")}
    assert set(differing.values()) == {"equal"}, differing
    errors = {name: error for name, error in found.items() if name.startswith("error_")}
    assert all(error < MOST_ERROR for error in errors.values()), errors


def _check_product(
    card: Any, addresses: tuple[int, int], row: np.ndarray, inputs: int, found: Findings, name: str
) -> None:
    x = card.floats(addresses[0], inputs).astype(np.float64)
    some = card.floats(addresses[1], 256 * inputs).reshape(256, inputs).astype(np.float64)
    exact = some @ x
    error = np.linalg.norm(row[:256] - exact) / np.linalg.norm(exact)
    found[f"error_{name}"] = float(f"{error:.3g}")


def _e4m3() -> np.ndarray:
    """Return the numbers of the 256 codes of e4m3; the two NaN codes as 0."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent, 2.0 ** (exponent - 7.0) * (1 + fraction / 8), fraction / 512.0)
    signed: np.ndarray = np.where(code > 127, -size, size)
    return np.where(code & 127 == 127, 0.0, signed)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of the codes of MXFP4."""


def _stored_forms(card: Any, found: Findings, model: Model, buffers: tuple[int, int]) -> list[str]:
    """Check the products of quantised weights against float64, in several tiles."""
    differing = []
    x, y = buffers
    for form in (Form.FP8, Form.INT4, Form.Q4_0, Form.Q8_0, Form.MXFP4):
        make = model.launches(card, form=form)
        weights = make.weights.layers[0].output
        reference = None
        for tile in (
            Tile(64, 64, 128, 4, 3), Tile(16, 64, 128, 4, 3), Tile(128, 64, 128, 8, 3),
            Tile(8, 16, 128, 8, 3, is_together=True), Tile(32, 16, 256, 8, 3, is_together=True),
        ):  # fmt: skip
            launch = make.product(x, weights, y, 5, tile=tile)
            if not card.is_real:
                continue
            launch(card.stream)
            values = card.floats(y, 5 * weights.num_outputs).reshape(5, -1)
            if reference is None:
                reference = values
                exact = exact_rows(card, weights, 64) @ card.floats(x, weights.num_inputs)
                error = np.linalg.norm(values[0, :64] - exact) / np.linalg.norm(exact)
                found[f"error_{form.name}"] = float(f"{error:.3g}")
            if not np.array_equal(values, reference):
                differing.append(f"{form.name} {tile_name(tile)}")
    return differing


def exact_rows(card: Any, weights: Matrix, count: int) -> np.ndarray:
    """Return the first `count` outputs' weights as float64."""
    inputs = weights.num_inputs
    groups = inputs // 128
    if weights.form is Form.FP8:
        raw = np.frombuffer(card.device.download(weights.address, count * inputs), np.uint8)
        codes = raw.reshape(count, groups, 64, 2).transpose(0, 1, 3, 2).reshape(count, inputs)
        scales = np.frombuffer(card.device.download(weights.scales, 4 * groups), np.float32)
        return _e4m3()[codes] * np.repeat(scales.astype(np.float64), 128)
    raw = card.device.download(weights.address, count * inputs * weights.form.bits // 8)
    if weights.form is Form.Q8_0:
        pairs = np.frombuffer(raw, np.int8).reshape(count, groups, 2, 32, 2)
        numbers = pairs.transpose(0, 1, 2, 4, 3).reshape(count, groups, 4, 32).astype(float)
    else:
        words = np.frombuffer(raw, np.uint16).reshape(count, groups, 1, 32)
        parts = words >> np.arange(0, 16, 4).reshape(4, 1) & 15
        numbers = _E2M1[parts] if weights.form is Form.MXFP4 else parts.astype(float) - 8.0
    if weights.form is Form.INT4:
        floats = card.floats(weights.scales, count * groups)
        scales = floats.astype(float).reshape(count, groups, 1, 1)
    elif weights.form is Form.MXFP4:
        raw = card.device.download(weights.scales, 4 * count * groups)
        exponents = np.frombuffer(raw, np.uint8).astype(int) - 127
        scales = np.ldexp(1.0, exponents).reshape(count, groups, 4, 1)
    else:
        raw = card.device.download(weights.scales, 8 * count * groups)
        scales = np.frombuffer(raw, np.float16).astype(float).reshape(count, groups, 4, 1)
    scaled: np.ndarray = numbers * scales
    return scaled.reshape(count, inputs)


def _steps_agree(card: Any, found: Findings, model: Model, name: str, **layers: Any) -> None:
    """Logits of one prompt: whole, cut, and its last tokens decoded alone and among others.

    `layers` are options of `Model.launches`.
    """
    rng = np.random.default_rng(0)
    prompt = [int(token) for token in rng.integers(0, QWEN3_8B.vocab_size, 700)]
    logits: dict[str, np.ndarray] = {}
    table = range(11)
    for label, shape in (
        ("whole", AttentionShape()),
        ("whole, tiles of 64", AttentionShape(chunk_rows=64, chunk_warps=4)),
    ):
        make = model.launches(card, shape, **layers)
        chunks = ChunkStep(card.device, make, card.stream, 1024, 2, 1024)
        chunks.run([ChunkRow(prompt, 0, table)])
        logits[label] = chunks.logits(1)[0].copy()
        if label == "whole":
            for first, last in ((0, 1), (1, 64), (64, 364), (364, 700)):
                chunks.run([ChunkRow(prompt[first:last], first, range(20, 31))])
            logits["cut"] = chunks.logits(1)[0].copy()
            chunks.run(
                [ChunkRow(prompt[::-1], 0, range(40, 51)), ChunkRow(prompt[:300], 0, range(60, 71))]
            )
            chunks.run(
                [
                    ChunkRow(prompt[1:320], 0, range(40, 51)),
                    ChunkRow(prompt[300:], 300, range(60, 71)),
                ]
            )
            logits["beside another"] = chunks.logits(2)[1].copy()
        chunks.close()
    for count in (1, 8, 32, 128):
        for label, shape in (
            (f"decoded, {count}", AttentionShape()),
            (f"decoded, {count}, attention of 64 rows", AttentionShape(tile_rows=64, programs=100)),
        ):
            make = model.launches(card, shape, **layers)
            step = Decoding(card.device, make, card.stream, count, 1024)
            tables: np.ndarray = np.tile(np.arange(80, 80 + step.table_width), (count, 1))
            tables += np.arange(count)[:, None] * 12
            mine = count - 1
            tables[mine, :11] = np.arange(11)
            for place in range(690, 700):
                tokens = rng.integers(0, QWEN3_8B.vocab_size, count)
                tokens[mine] = prompt[place]
                lasts = rng.integers(100, 700, count)
                lasts[mine] = place
                step.set_rows(tokens, lasts, tables)
                if card.is_real:
                    step.drawn()
                else:
                    step.launch()
            if card.is_real:
                logits[label] = step.logits()[mine].copy()
            step.close()
    if not card.is_real:
        return
    whole = logits["whole"]
    found["logits_finite"] = found.get("logits_finite", True) and bool(np.isfinite(whole).all())
    found["logits_std"] = float(whole.std())
    differing = [
        f"{label}: {np.abs(values - whole).max():.3g}"
        for label, values in logits.items()
        if not np.array_equal(values, whole)
    ]
    found[name] = "; ".join(differing) or "equal"
    print(f"{name}:", found[name], found["logits_std"], flush=True)
