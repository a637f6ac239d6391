"""Products of weights in bfloat16, against float64."""

from __future__ import annotations

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import Matrix
from tests.gpu_kernels.interpreted import rounded, widened
from tests.gpu_kernels.tiny_decoder import TinyDecoder
from tests.gpu_kernels.uploaded import upload

INPUTS = 256
ROWS = 5


@pytest.fixture(scope="module")
def tiny() -> TinyDecoder:
    return TinyDecoder()


def stored(device: InterpretedDevice, outputs: int) -> tuple[Matrix, np.ndarray]:
    """Return random weights, and the same as float64 [outputs, INPUTS]."""
    rng = np.random.default_rng(1)
    bits = rounded(rng.standard_normal((outputs, INPUTS)).astype(np.float32))
    return Matrix(upload(device, bits), outputs, INPUTS), widened(bits).astype(np.float64)


def close(found: np.ndarray, exact: np.ndarray) -> bool:
    """Return whether a result differs by bfloat16's rounding alone."""
    error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    return error < 4e-3


@pytest.mark.parametrize("depth", [128, 256])
def test_a_product_adds_its_residual(tiny: TinyDecoder, depth: int) -> None:
    """No tile of 32 divides 150 outputs: nothing is written after them."""
    device, outputs = tiny.device, 150
    matrix, exact = stored(device, outputs)
    rng = np.random.default_rng(5)
    x, before = (
        rounded(rng.standard_normal((ROWS, size)).astype(np.float32)) for size in (INPUTS, outputs)
    )
    y = device.allocate(2 * ROWS * outputs + 64)
    tile = Tile(16, 32, depth, 4, 3)
    make = tiny.launches(tile)
    make.product(
        upload(device, x), matrix, y.address, ROWS, residual=upload(device, before), tile=tile
    )(0)
    found = tiny.floats(y.address, ROWS, outputs)
    assert close(found, widened(x) @ exact.T + widened(before))
    assert bytes(device.download(y.address + 2 * ROWS * outputs, 64)) == b"\xff" * 64


def test_gate_and_up(tiny: TinyDecoder) -> None:
    device = tiny.device
    matrix, exact = stored(device, 256)
    x = rounded(np.random.default_rng(6).standard_normal((ROWS, INPUTS)).astype(np.float32) / 8)
    y = device.allocate(2 * ROWS * 128)
    tile = Tile(16, 64, 128, 4, 3)
    tiny.launches(tile).gate_up(upload(device, x), matrix, y.address, ROWS, tile=tile)(0)
    gate, up = np.split(widened(x) @ exact.T, 2, axis=1)
    assert close(tiny.floats(y.address, ROWS, 128), gate / (1 + np.exp(-gate)) * up)
