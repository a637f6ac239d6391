"""Products in every form of weights, against float64."""

from __future__ import annotations

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import GROUP_INPUTS, Form, Matrix
from tests.gpu_kernels.interpreted import rounded, widened
from tests.gpu_kernels.tiny_decoder import TinyDecoder

INPUTS = 256
ROWS = 5


@pytest.fixture(scope="module")
def tiny() -> TinyDecoder:
    return TinyDecoder()


def upload(device: InterpretedDevice, values: np.ndarray) -> int:
    memory = device.allocate(values.nbytes)
    device.upload(memory.address, np.ascontiguousarray(values).tobytes())
    return memory.address


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Return the numbers of e4m3 codes, without those of NaN."""
    exponent, fraction = (codes >> 3) & 15, codes & 7
    size = np.where(exponent, 2.0 ** (exponent - 7.0) * (1 + fraction / 8), fraction / 512)
    signed: np.ndarray = np.where(codes > 127, -size, size)
    return signed


def stored(device: InterpretedDevice, form: Form, outputs: int) -> tuple[Matrix, np.ndarray]:
    """Return random weights in a form, and the same as float64 [outputs, INPUTS]."""
    rng = np.random.default_rng(int(form))
    groups = INPUTS // GROUP_INPUTS
    if form is Form.BF16:
        bits = rounded(rng.standard_normal((outputs, INPUTS)).astype(np.float32))
        return Matrix(upload(device, bits), outputs, INPUTS), widened(bits).astype(np.float64)
    if form is Form.FP8:
        codes = rng.integers(0, 256, (outputs, INPUTS), dtype=np.uint8)
        codes[codes & 127 == 127] = 0
        blocks = -(-outputs // GROUP_INPUTS)
        scales = rng.standard_normal((blocks, groups)).astype(np.float32)
        matrix = Matrix(upload(device, codes), outputs, INPUTS, form, upload(device, scales))
        wide = np.repeat(np.repeat(scales, GROUP_INPUTS, 0)[:outputs], GROUP_INPUTS, 1)
        return matrix, e4m3(codes.astype(int)) * wide
    numbers = rng.integers(0, 16, (outputs, groups, 2, GROUP_INPUTS // 2), dtype=np.uint8)
    packed = numbers[:, :, 0] | (numbers[:, :, 1] << 4)
    bits = rounded(rng.standard_normal((outputs, groups)).astype(np.float32))
    matrix = Matrix(upload(device, packed), outputs, INPUTS, form, upload(device, bits))
    values = (numbers.astype(np.float64) - 8) * widened(bits)[:, :, None, None]
    return matrix, values.reshape(outputs, INPUTS)


def close(found: np.ndarray, exact: np.ndarray) -> bool:
    """Return whether a result differs by bfloat16's rounding alone."""
    error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    return error < 4e-3


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("depth", [128, 256])
def test_a_product_adds_its_residual(tiny: TinyDecoder, form: Form, depth: int) -> None:
    """No tile of 32 divides 150 outputs: nothing is written behind them."""
    device, outputs = tiny.device, 150
    matrix, exact = stored(device, form, outputs)
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


@pytest.mark.parametrize("form", list(Form))
def test_gate_and_up(tiny: TinyDecoder, form: Form) -> None:
    device = tiny.device
    matrix, exact = stored(device, form, 256)
    x = rounded(np.random.default_rng(6).standard_normal((ROWS, INPUTS)).astype(np.float32) / 8)
    y = device.allocate(2 * ROWS * 128)
    tile = Tile(16, 64, 128, 4, 3)
    tiny.launches(tile).gate_up(upload(device, x), matrix, y.address, ROWS, tile=tile)(0)
    gate, up = np.split(widened(x) @ exact.T, 2, axis=1)
    assert close(tiny.floats(y.address, ROWS, 128), gate / (1 + np.exp(-gate)) * up)
