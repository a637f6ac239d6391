"""Products of int8 rows: the same integers by every instruction, and no trace of the batch."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from engine.runner.kernels.products import byte_dot
from engine.runner.kernels.products.activations import silu_kernel
from engine.runner.kernels.products.byte_dot import available
from engine.runner.kernels.products.byte_product import byte_kernel
from engine.runner.kernels.products.byte_rows import RECORD_BYTES, SCALED_OFFSET, STEPS_AT, SUM_AT
from engine.runner.kernels.products.group_layout import CODES, LAYOUTS
from engine.runner.kernels.products.linear import BYTES, gated_linear, linear
from engine.runner.weights.stored_formats import dequantise
from tests.support.examples import everyday
from tests.support.models.byte_kernels import EVERY, FEW, KINDS
from tests.support.models.packing import GROUPED_FORMATS, NONE, NONE_2D, normal, packed, stored
from tests.unit.engine.runner.kernels.products.byte_reference import (
    in_int8,
    quantised_rows,
    wanted_product,
)

TRIED = (FEW, EVERY)[everyday(0, of=1)]


def records_of(quantised: np.ndarray) -> np.ndarray:
    return quantised.view(np.uint8).reshape(len(quantised), -1, RECORD_BYTES)


@cache
def _case(name: str, is_fine: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and what a product with the format must be, from numpy's integers."""
    depth = 768 if name.endswith("K") else 96
    x = normal(64, depth, seed=1)
    x[3] = 0.0
    x[4, :32] *= 1e4
    x[5, 3::16] *= 40  # as some channels of a model are
    return x, wanted_product(name, x, 70, is_fine=is_fine)


@pytest.mark.parametrize("is_fine", KINDS)
@pytest.mark.parametrize("name", GROUPED_FORMATS)
def test_every_row_alone_and_in_any_batch_is_what_numpy_computes(name: str, is_fine: bool) -> None:
    x, wanted = _case(name, is_fine)
    weight = packed(stored(name, 70, x.shape[1]), with_bytes=True, is_fine=is_fine)
    quantised = in_int8(x, is_fine=is_fine)
    for num_rows, num_threads in product(range(1, 65), (1, 2)):
        out = np.full((num_rows, 70), np.nan, np.float32)
        linear(x[:num_rows], weight.table, NONE, NONE_2D, quantised[:num_rows], out, num_threads)
        np.testing.assert_array_equal(out, wanted[:num_rows])


@pytest.mark.parametrize(("name", "is_fine", "instruction"), TRIED)
def test_every_instruction_gives_the_same_bits(name: str, is_fine: bool, instruction: str) -> None:
    x, wanted = _case(name, is_fine)
    weight = packed(stored(name, 70, x.shape[1]), with_bytes=True, is_fine=is_fine)
    weight.table[0, BYTES] = byte_kernel(CODES[name], instruction, is_fine=is_fine)
    for num_rows in (*range(1, 9), 16, 31, 64):
        rows, out = x[:num_rows], np.empty_like(wanted[:num_rows])
        linear(rows, weight.table, NONE, NONE_2D, in_int8(rows, is_fine=is_fine), out, 2)
        np.testing.assert_array_equal(out, wanted[:num_rows], f"{num_rows} rows")


def test_every_instruction_is_tried_with_the_bytes_that_it_may_have_to_make_signed() -> None:
    """And with smaller ones, in everyday runs too: of a format it is told nothing else."""
    assert "plain" in available()
    ways, tried = (
        {(one, LAYOUTS[CODES[name]].offset == SCALED_OFFSET) for name, _, one in choice}
        for choice in (EVERY, FEW)
    )
    assert tried == ways
    assert {is_fine for _, is_fine, _ in FEW} == set(KINDS)


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


@pytest.mark.parametrize(
    ("is_fine", "instruction"), [tried[1:] for tried in TRIED if tried[0] == "Q8_0"]
)
def test_extreme_bytes_do_not_saturate(is_fine: bool, instruction: str) -> None:
    tensor = stored("Q8_0", 16, 64)
    tensor.rows.reshape(16, 2, 34)[..., 2:] = 128  # the byte -128
    x = np.ones((1, 64), np.float32)
    weight = packed(tensor, with_bytes=True, is_fine=is_fine)
    weight.table[0, BYTES] = byte_kernel(CODES["Q8_0"], instruction, is_fine=is_fine)
    out = np.empty((1, 16), np.float32)
    linear(x, weight.table, NONE, NONE_2D, in_int8(x, is_fine=is_fine), out, 1)
    np.testing.assert_allclose(out[0], dequantise(tensor) @ x[0], rtol=1e-5)


@pytest.mark.parametrize("is_fine", KINDS)
def test_a_group_of_a_row_is_quantised_by_itself(is_fine: bool) -> None:
    x = normal(5, 160)
    x[1] = 0.0
    records = records_of(in_int8(x, is_fine=is_fine))
    step, values = quantised_rows(x, is_fine)
    np.testing.assert_array_equal(records[..., :32].view(np.int8), values)
    found = records[..., STEPS_AT : STEPS_AT + 8].view(np.float32)
    np.testing.assert_array_equal(found, step)
    sums = records[..., SUM_AT : SUM_AT + 4].view(np.float32)[..., 0]
    integers = values.reshape(5, -1, 2, 16).sum(axis=3).astype(np.float32)
    np.testing.assert_array_equal(sums, (step * integers).sum(axis=2))
    for row in range(5):
        alone = records_of(in_int8(x[row : row + 1], is_fine=is_fine))
        np.testing.assert_array_equal(alone[0], records[row])


def test_a_large_channel_takes_bits_from_half_a_group_of_a_fine_row() -> None:
    x = normal(1, 32, seed=1)
    x[0, 3] = 100.0
    for is_fine, touched in ((False, 32), (True, 16)):
        step, values = quantised_rows(x, is_fine)
        records = records_of(in_int8(x, is_fine=is_fine))
        np.testing.assert_array_equal(records[0, 0, :32].view(np.int8), values[0, 0])
        error = np.abs(values[0, 0] * np.repeat(step[0, 0], 16) - x[0])
        assert (error[:touched] > 0.05).any()
        assert (error[touched:] < 0.02).all()


@pytest.mark.parametrize("is_fine", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float, is_fine: bool) -> None:
    x = normal(2, 64)
    x[1, 40] = bad
    weight = packed(stored("Q4_1", 32, 64), with_bytes=True, is_fine=is_fine)
    out = np.empty((2, 32), np.float32)
    linear(x, weight.table, NONE, NONE_2D, in_int8(x, is_fine=is_fine), out, 1)
    assert np.isfinite(out[0]).all()
    assert not np.isfinite(out[1]).any()


@pytest.mark.parametrize("num_rows", [1, 9, 35])
def test_gate_and_up_of_two_formats(num_rows: int) -> None:
    gate, up = stored("Q4_1", 96, 96), stored("Q5_0", 96, 96, seed=1)
    x, bias = normal(num_rows, 96, seed=2), normal(192, seed=3)
    quantised, out = in_int8(x), np.empty((num_rows, 96), np.float32)
    gated_linear(x, packed(gate, up, with_bytes=True).table, bias, silu_kernel(), quantised, out, 2)
    gates, ups = (
        np.empty((num_rows, 96), np.float32),
        np.empty((num_rows, 96), np.float32),
    )
    by_panel = bias.reshape(-1, 2, 16).swapaxes(0, 1).reshape(2, -1)
    for tensor, added, target in zip((gate, up), by_panel, (gates, ups), strict=True):
        table = packed(tensor, with_bytes=True).table
        linear(x, table, np.ascontiguousarray(added), NONE_2D, quantised, target, 1)
    np.testing.assert_allclose(out, gates / (1 + np.exp(-gates)) * ups, rtol=2e-6, atol=1e-7)


def test_a_weight_without_groups_keeps_float32_rows() -> None:
    tensors = [stored("Q8_0", 16, 64), stored("F16", 16, 64)]
    x = normal(3, 64)
    outs = np.empty((2, 3, 32), np.float32)
    for out, with_bytes in zip(outs, (False, True), strict=True):
        linear(x, packed(*tensors, with_bytes=with_bytes).table, NONE, NONE_2D, in_int8(x), out, 1)
    np.testing.assert_array_equal(outs[0], outs[1])


def test_products_of_int8_rows_are_within_a_percent_of_exact_ones() -> None:
    assert {layout.name for layout in LAYOUTS if layout.is_grouped} == set(GROUPED_FORMATS)
    for name in GROUPED_FORMATS:
        errors = []
        for is_fine in KINDS:
            x, wanted = _case(name, is_fine)
            exact = x.astype(np.float64) @ dequantise(stored(name, 70, x.shape[1])).T
            norms = np.maximum(np.linalg.norm(exact, axis=1), 1)
            errors.append((np.linalg.norm(wanted - exact, axis=1) / norms).mean())
        assert errors[1] < 0.95 * errors[0] < 0.01
