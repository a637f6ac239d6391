"""Products of int8 rows: the same integers by every instruction, and no trace of the batch."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from engine.runner.kernels.norms import quantise_rows
from engine.runner.kernels.products import byte_dot
from engine.runner.kernels.products.block_layout import CODES, LAYOUTS
from engine.runner.kernels.products.byte_dot import available
from engine.runner.kernels.products.byte_product import byte_kernel
from engine.runner.kernels.products.byte_rows import RECORD_BYTES, STEP_AT, SUM_AT
from engine.runner.kernels.products.linear import BYTES, gated_linear, linear
from engine.runner.weights.stored_formats import dequantise
from tests.unit.runner.packing import BLOCK_FORMATS, NONE, NONE_2D, fma, normal, packed, stored


def in_int8(x: np.ndarray) -> np.ndarray:
    out = np.zeros((x.shape[0], x.shape[1] // 2), np.float32)
    quantise_rows(x, out)
    return out


def records_of(quantised: np.ndarray) -> np.ndarray:
    return quantised.view(np.uint8).reshape(len(quantised), -1, RECORD_BYTES)


@cache
def _case(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and what a product with the format must be, from numpy's integers."""
    depth = 768 if name.endswith("K") else 96
    x = normal(64, depth, seed=1)
    x[3] = 0.0
    x[4, :32] *= 1e4
    return x, wanted_product(name, x, 70)


def wanted_product(name: str, x: np.ndarray, num_outputs: int) -> np.ndarray:
    """What a product of these rows, in int8, must be with a weight of `stored`."""
    tensor = stored(name, num_outputs, x.shape[1])
    step, values = _quantised(x)
    numbers, steps, minima = _numbers(name, dequantise(tensor), tensor.rows)
    out = np.zeros((len(x), num_outputs), np.float32)
    parts = steps.shape[2]
    for block in range(x.shape[1] // 32):
        for part in range(parts):
            within = slice(part * 32 // parts, (part + 1) * 32 // parts)
            sums = values[:, block, within].astype(np.int64) @ numbers[:, block, within].T
            scaled = sums.astype(np.float32) * step[:, block, None]
            out = fma(scaled, steps[None, :, block, part], out)
        if minima is not None:
            sums = values[:, block].astype(np.int64).sum(axis=1).astype(np.float32)
            out = fma((sums * step[:, block])[:, None], minima[None, :, block], out)
    return out


def _quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=2)
    factor = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), 0)
    values = np.rint(blocks * factor.astype(np.float32)[..., None]).astype(np.int8)
    return largest / np.float32(127), values


def _numbers(
    name: str, weight: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return a weight's integers, steps `[outputs, blocks, parts]`, and minima of blocks."""
    outputs = len(weight)
    if name.endswith("K"):
        blocks = rows.reshape(outputs, -1, {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[name])
        if name == "Q6_K":
            factor = np.ascontiguousarray(blocks[..., 208:]).view(np.float16).astype(np.float32)
            parts = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
            steps, minima = (factor * parts).reshape(outputs, -1, 2), None
        else:
            factors = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
            sc = blocks[..., 4:16].astype(np.int32)
            low, mid, high = sc[..., :4], sc[..., 4:8], sc[..., 8:]
            steps = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
            mins = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], -1)
            steps = (factors[..., :1] * steps.astype(np.float32)).reshape(outputs, -1, 1)
            minima = -(factors[..., 1:] * mins.astype(np.float32)).reshape(outputs, -1)
    else:
        size = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}[name]
        blocks = rows.reshape(outputs, -1, size)
        steps = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
        minima = None
        if name.endswith("_1"):
            halves = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
            minima = halves.astype(np.float32)
    values = weight.reshape(outputs, -1, 32).astype(np.float64)
    values = values - (0 if minima is None else minima[..., None])
    spread = np.repeat(steps, 32 // steps.shape[2], axis=2)
    numbers = np.where(spread == 0, 0, np.rint(values / np.where(spread == 0, 1, spread)))
    return numbers.astype(np.int64), steps, minima


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_row_alone_and_in_any_batch_is_what_numpy_computes(name: str) -> None:
    x, wanted = _case(name)
    weight = packed(stored(name, 70, x.shape[1]), with_bytes=True)
    quantised = in_int8(x)
    for num_rows, num_threads in itertools.product(range(1, 65), (1, 2)):
        out = np.full((num_rows, 70), np.nan, np.float32)
        linear(x[:num_rows], weight.table, NONE, NONE_2D, quantised[:num_rows], out, num_threads)
        np.testing.assert_array_equal(out, wanted[:num_rows])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_instruction_gives_the_same_bits(name: str) -> None:
    x, wanted = _case(name)
    weight = packed(stored(name, 70, x.shape[1]), with_bytes=True)
    assert "plain" in available()
    for instruction in available():
        weight.table[0, BYTES] = byte_kernel(CODES[name], instruction)
        for num_rows in (*range(1, 9), 16, 31, 64):
            rows, out = x[:num_rows], np.empty_like(wanted[:num_rows])
            linear(rows, weight.table, NONE, NONE_2D, in_int8(rows), out, 2)
            np.testing.assert_array_equal(out, wanted[:num_rows], f"{instruction}, {num_rows}")


ARM_FEATURES = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop"


@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        ("neoverse-n1", [f"{ARM_FEATURES} asimddp ssbs"] * 2, ("neon", "plain")),
        ("cortex-a72", [ARM_FEATURES] * 2, ("plain",)),
        ("cortex-a76", [f"{ARM_FEATURES} asimddp", ARM_FEATURES], ("plain",)),
        # LLVM emits the instruction for processors that it knows.
        ("generic", [f"{ARM_FEATURES} asimddp"], ("plain",)),
        ("neoverse-n1", [], ("plain",)),
    ],
)
def test_the_instruction_of_an_arm_host_is_found(
    name: str,
    features: list[str],
    expected: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LLVM does not list `dotprod` among the features of a Linux host."""
    monkeypatch.setattr(byte_dot, "get_process_triple", lambda: "aarch64-unknown-linux-gnu")
    monkeypatch.setattr(byte_dot, "get_host_cpu_features", lambda: {"neon": True, "lse": True})
    monkeypatch.setattr(byte_dot, "get_host_cpu_name", lambda: name)
    (tmp_path / "proc").mkdir()
    lines = [f"processor\t: {n}\nFeatures\t: {found}\n" for n, found in enumerate(features)]
    (tmp_path / "proc/cpuinfo").write_text("\n".join(lines))
    assert available(tmp_path) == expected
    monkeypatch.setattr(byte_dot, "get_host_cpu_features", lambda: {"dotprod": True})
    assert available(tmp_path / "macos") == ("neon", "plain")


def test_extreme_bytes_do_not_saturate() -> None:
    tensor = stored("Q8_0", 16, 64)
    tensor.rows.reshape(16, 2, 34)[..., 2:] = 128  # the byte -128
    x = np.ones((1, 64), np.float32)
    wanted = dequantise(tensor) @ x[0]
    for instruction in available():
        weight = packed(tensor, with_bytes=True)
        weight.table[0, BYTES] = byte_kernel(CODES["Q8_0"], instruction)
        out = np.empty((1, 16), np.float32)
        linear(x, weight.table, NONE, NONE_2D, in_int8(x), out, 1)
        np.testing.assert_allclose(out[0], wanted, rtol=1e-5)


def test_a_block_of_a_row_is_quantised_by_itself() -> None:
    x = normal(5, 160)
    x[1] = 0.0
    records = records_of(in_int8(x))
    step, values = _quantised(x)
    np.testing.assert_array_equal(records[..., :32].view(np.int8), values)
    found = records[..., STEP_AT : STEP_AT + 4].view(np.float32)[..., 0]
    np.testing.assert_array_equal(found, step)
    sums = records[..., SUM_AT : SUM_AT + 4].view(np.float32)[..., 0]
    np.testing.assert_array_equal(sums, step * values.sum(axis=2).astype(np.float32))
    for row in range(5):
        alone = records_of(in_int8(x[row : row + 1]))
        np.testing.assert_array_equal(alone[0], records[row])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = normal(2, 64)
    x[1, 40] = bad
    weight = packed(stored("Q4_1", 32, 64), with_bytes=True)
    out = np.empty((2, 32), np.float32)
    linear(x, weight.table, NONE, NONE_2D, in_int8(x), out, 1)
    assert np.isfinite(out[0]).all()
    assert not np.isfinite(out[1]).any()


@pytest.mark.parametrize("num_rows", [1, 9, 35])
def test_gate_and_up_of_two_formats(num_rows: int) -> None:
    gate, up = stored("Q4_1", 96, 96), stored("Q5_0", 96, 96, seed=1)
    x, bias = normal(num_rows, 96, seed=2), normal(192, seed=3)
    quantised, out = in_int8(x), np.empty((num_rows, 96), np.float32)
    gated_linear(x, packed(gate, up, with_bytes=True).table, bias, quantised, out, 2)
    gates, ups = (
        np.empty((num_rows, 96), np.float32),
        np.empty((num_rows, 96), np.float32),
    )
    by_panel = bias.reshape(-1, 2, 16).swapaxes(0, 1).reshape(2, -1)
    for tensor, added, target in zip((gate, up), by_panel, (gates, ups), strict=True):
        table = packed(tensor, with_bytes=True).table
        linear(x, table, np.ascontiguousarray(added), NONE_2D, quantised, target, 1)
    np.testing.assert_allclose(out, gates / (1 + np.exp(-gates)) * ups, rtol=2e-6, atol=1e-7)


def test_a_weight_without_blocks_keeps_float32_rows() -> None:
    tensors = [stored("Q8_0", 16, 64), stored("F16", 16, 64)]
    x = normal(3, 64)
    outs = np.empty((2, 3, 32), np.float32)
    for out, with_bytes in zip(outs, (False, True), strict=True):
        linear(x, packed(*tensors, with_bytes=with_bytes).table, NONE, NONE_2D, in_int8(x), out, 1)
    np.testing.assert_array_equal(outs[0], outs[1])


def test_products_of_int8_rows_are_within_a_percent_of_exact_ones() -> None:
    assert {layout.name for layout in LAYOUTS if layout.is_blocks} == set(BLOCK_FORMATS)
    for name in BLOCK_FORMATS:
        x, wanted = _case(name)
        exact = x.astype(np.float64) @ dequantise(stored(name, 70, x.shape[1])).T
        error = np.linalg.norm(wanted - exact, axis=1) / np.maximum(
            np.linalg.norm(exact, axis=1), 1
        )
        assert error.mean() < 0.01
