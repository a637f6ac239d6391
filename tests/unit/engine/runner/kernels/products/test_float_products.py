"""Products on packed weights: right, and with the same bits for a row in any batch."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numba import int64, njit

from engine.runner.kernels.norms import rms_norm
from engine.runner.kernels.products.activations import silu_kernel
from engine.runner.kernels.products.linear import gated_linear, gather_columns, linear
from engine.runner.kernels.products.panel_product import PANEL_ROWS, panel_product
from engine.runner.kernels.vector_ir import LANES
from engine.runner.kernels.vector_math import (
    KEY_TILE,
    gelu_product,
    silu_product,
    softmax_tile,
)
from tests.support.models.packing import NONE, NONE_2D, floats, normal
from tests.support.models.packing import packed as pack

ROWS = [*range(1, 15), 16, 17, 32, 33, 95, 96, 97, 130]
# SmolLM2-135M: fused qkv, attention output, MLP down, and a slice of the vocabulary.
SHAPES = [(960, 576), (576, 576), (576, 1536), (1000, 576)]


def packed(*weights: np.ndarray) -> np.ndarray:
    return pack(*[floats(weight) for weight in weights]).table


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_a_row_is_the_same_alone_and_in_any_batch(num_outputs: int, num_inputs: int) -> None:
    weight, x = normal(num_outputs, num_inputs), normal(130, num_inputs, seed=1)
    panels = packed(weight)
    alone = np.empty((130, num_outputs), np.float32)
    for row in range(130):
        linear(x[row : row + 1], panels, NONE, NONE_2D, NONE_2D, alone[row : row + 1], 1)
    np.testing.assert_allclose(alone, x.astype(np.float64) @ weight.astype(np.float64).T, atol=2e-3)
    for num_rows in ROWS:
        for num_threads in (1, 2):
            out = np.full((num_rows, num_outputs), np.nan, np.float32)
            linear(x[:num_rows], panels, NONE, NONE_2D, NONE_2D, out, num_threads)
            np.testing.assert_array_equal(out, alone[:num_rows])


LOOP = re.compile(r"^(\.L\w+):\n((?:(?!\.L\w+:).*\n)*?\s+j\w+\s+\1)$", re.MULTILINE)


@pytest.mark.skipif(PANEL_ROWS != 10, reason="the processor has no AVX-512")
def test_accumulators_stay_in_their_registers() -> None:
    product = njit(nogil=True, error_model="numpy")(panel_product.py_func)
    product.compile((int64,) * 8)
    (assembly,) = product.inspect_asm().values()
    loops = [body for _, body in LOOP.findall(assembly) if "vfmadd" in body]
    assert [body.count("vfmadd") for body in loops].count(2 * PANEL_ROWS) >= 1
    for body in loops:
        assert not re.search(r"vmov\w+\s+%zmm\d+, .*%rsp", body), body


@pytest.mark.parametrize("num_rows", [1, 6, 35, 100])
def test_gate_and_up(num_rows: int) -> None:
    gate, up, x = normal(1536, 576), normal(1536, 576, seed=1), normal(100, 576, seed=2) * 0.1
    bias = normal(2 * 1536, seed=3)
    panels = packed(gate, up)
    by_panel = bias.reshape(-1, 2, LANES)
    for biases, added in ((NONE, (0.0, 0.0)), (bias, by_panel.swapaxes(0, 1).reshape(2, -1))):
        out = np.empty((num_rows, 1536), np.float32)
        gated_linear(x[:num_rows], panels, biases, silu_kernel(), NONE_2D, out, 2)
        gates, ups = x[:num_rows] @ gate.T + added[0], x[:num_rows] @ up.T + added[1]
        np.testing.assert_allclose(out, gates / (1 + np.exp(-gates)) * ups, atol=1e-3)
        for row in range(0, num_rows, 7):
            alone = np.empty((1, 1536), np.float32)
            gated_linear(x[row : row + 1], panels, biases, silu_kernel(), NONE_2D, alone, 1)
            np.testing.assert_array_equal(alone[0], out[row])


def test_bias_and_a_residual_that_is_the_output() -> None:
    weight, x, bias, residual = normal(48, 32), normal(20, 32), normal(48), normal(20, 48, seed=5)
    out = residual.copy()
    linear(x, packed(weight), bias, out, NONE_2D, out, 2)
    np.testing.assert_allclose(out, x @ weight.T + bias + residual, atol=1e-4)


def test_embedding_rows_come_back_out_of_a_packed_weight() -> None:
    weight, ids = normal(97, 32), np.array([96, 0, 15, 16, 96])
    out = np.empty((5, 32), np.float32)
    gather_columns(packed(weight), ids, out)
    np.testing.assert_array_equal(out, weight[ids])


@pytest.mark.parametrize("num_rows", [1, 16, 17, 40])
def test_rms_norm(num_rows: int) -> None:
    x, weight = normal(40, 576) * 3, normal(576, seed=1)
    out, alone = np.empty((num_rows, 576), np.float32), np.empty((1, 576), np.float32)
    rms_norm(x[:num_rows], weight, np.float32(1e-5), out)
    wide = x[:num_rows].astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, wanted, rtol=2e-6, atol=1e-6)
    rms_norm(x[num_rows - 1 : num_rows], weight, np.float32(1e-5), alone)
    np.testing.assert_array_equal(alone[0], out[-1])


@njit
def _softmax_tile(scores, maximum, sums):  # type: ignore[no-untyped-def]
    return softmax_tile(scores.ctypes.data, maximum.ctypes.data, sums.ctypes.data)


@njit
def _silu_product(gate, up, out):  # type: ignore[no-untyped-def]
    silu_product(gate.ctypes.data, up.ctypes.data, out.ctypes.data)


@njit
def _gelu_product(gate, up, out):  # type: ignore[no-untyped-def]
    gelu_product(gate.ctypes.data, up.ctypes.data, out.ctypes.data)


def exps(xs: np.ndarray) -> np.ndarray:
    """e^x for x ≤ 0, as the softmax computes it."""
    padded = np.zeros(-(-xs.size // KEY_TILE) * KEY_TILE, np.float32)
    padded[: xs.size] = xs
    for tile in padded.reshape(-1, KEY_TILE):
        _softmax_tile(tile, np.zeros(1, np.float32), np.zeros(LANES, np.float32))
    return padded[: xs.size]


def test_exp_is_within_two_units_in_the_last_place() -> None:
    xs = np.linspace(-86.9, 0.0, 20001, dtype=np.float32)
    np.testing.assert_allclose(exps(xs), np.exp(xs.astype(np.float64)), rtol=2.4e-7)


def test_exp_at_the_ends() -> None:
    found = exps(np.array([0.0, -np.inf, -1e30, -87.5, np.nan], np.float32))
    np.testing.assert_array_equal(found, np.array([1.0, 0.0, 0.0, 0.0, np.nan], np.float32))


def test_online_softmax_over_two_tiles() -> None:
    scores = normal(2, KEY_TILE) * 5
    maximum, sums = np.full(1, -np.inf, np.float32), np.zeros(LANES, np.float32)
    tiles = scores.copy()
    first = _softmax_tile(tiles[0], maximum, sums)
    assert first == 0.0
    assert maximum[0] == scores[0].max()
    second = _softmax_tile(tiles[1], maximum, sums)
    assert maximum[0] == scores.max()
    assert second == pytest.approx(np.exp(scores[0].max() - scores.max()), rel=1e-6)
    wanted = np.exp(scores.astype(np.float64) - scores.max())
    np.testing.assert_allclose(np.stack([tiles[0] * second, tiles[1]]), wanted, rtol=1e-6)
    assert sums.sum() == pytest.approx(wanted.sum(), rel=1e-6)
    unchanged = _softmax_tile(np.full(KEY_TILE, -np.inf, np.float32), maximum, sums)
    assert unchanged == 1.0


def test_silu() -> None:
    gate = np.array([0.0, 1.0, -1.0, 200.0, -200.0, 1e-6, 20.0, -20.0] * 2, np.float32)
    up = np.arange(1, LANES + 1, dtype=np.float32)
    out = np.empty(LANES, np.float32)
    _silu_product(gate, up, out)
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(out, wide / (1 + np.exp(-wide)) * up, rtol=1e-6, atol=1e-30)


def test_gelu() -> None:
    gate = np.array([0.0, 1.0, -1.0, 200.0, -200.0, 1e-6, 3.0, -3.0] * 2, np.float32)
    up = np.arange(1, LANES + 1, dtype=np.float32)
    out = np.empty(LANES, np.float32)
    _gelu_product(gate, up, out)
    wide = gate.astype(np.float64)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))
    np.testing.assert_allclose(out, wide / 2 * (1 + tanh) * up, rtol=3e-6, atol=1e-30)
