"""Products whose inputs are divided into ranges: right, and the same bits whoever computes one."""

from __future__ import annotations

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.launches import KVPool
from engine.runner.gpu.weights import GROUP_INPUTS, Form, Matrix
from tests.gpu.ranged import MOST_ROWS, Ranged, RangedLaunches
from tests.gpu_kernels.interpreted import rounded, widened
from tests.gpu_kernels.test_products import close, e4m3, upload
from tests.gpu_kernels.tiny_decoder import BLOCK, NUM_BLOCKS, SHAPE, TinyDecoder

INPUTS = 1024
OUTPUTS = 64
ROWS = 5


@pytest.fixture(scope="module")
def tiny() -> TinyDecoder:
    return TinyDecoder()


@pytest.fixture(scope="module")
def make(tiny: TinyDecoder) -> RangedLaunches:
    device = tiny.device
    partials = device.allocate(4 * 2 * 8 * MOST_ROWS * OUTPUTS)
    counters = device.allocate(4 * 64)
    device.upload(counters.address, bytes(4 * 64))
    pool = KVPool(0, NUM_BLOCKS, BLOCK, tiny.piece_bytes)
    return RangedLaunches(
        InterpretedKernel, device.properties, tiny.spec, tiny.weights, pool, SHAPE,
        scratch=(partials.address, counters.address), choose=lambda *_: None,
    )  # fmt: skip


def stored(device: InterpretedDevice, form: Form) -> tuple[Matrix, np.ndarray]:
    """Return random weights of 2 OUTPUTS outputs, and the same as float64.

    The second half of an output's weights are the first half's negatives: sums nearly cancel, so
    that another order of additions shows in the few bits of a result.
    """
    rng = np.random.default_rng(int(form))
    outputs, groups = 2 * OUTPUTS, INPUTS // GROUP_INPUTS
    half = groups // 2
    if form is Form.FP8:
        codes = rng.integers(0, 256, (outputs, INPUTS), dtype=np.uint8)
        codes[codes & 127 == 127] = 0
        codes[:, INPUTS // 2 :] = codes[:, : INPUTS // 2]
        scales = rng.standard_normal((1, groups)).astype(np.float32)
        scales[:, half:] = -scales[:, :half]
        matrix = Matrix(upload(device, codes), outputs, INPUTS, form, upload(device, scales))
        return matrix, e4m3(codes.astype(int)) * np.repeat(scales, GROUP_INPUTS, 1)
    numbers = rng.integers(0, 16, (outputs, groups, 2, GROUP_INPUTS // 2), dtype=np.uint8)
    numbers[:, half:] = numbers[:, :half]
    packed = numbers[:, :, 0] | (numbers[:, :, 1] << 4)
    bits = rounded(rng.standard_normal((outputs, groups)).astype(np.float32))
    bits[:, half:] = bits[:, :half] ^ 0x8000
    matrix = Matrix(upload(device, packed), outputs, INPUTS, form, upload(device, bits))
    values = (numbers.astype(np.float64) - 8) * widened(bits)[:, :, None, None]
    return matrix, values.reshape(outputs, INPUTS)


@pytest.mark.parametrize("ranges", [2, 4, 8])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("form", [Form.FP8, Form.INT4])
def test_every_way_has_the_same_bits(
    tiny: TinyDecoder, make: RangedLaunches, form: Form, is_gated: bool, ranges: int
) -> None:
    device = tiny.device
    matrix, exact = stored(device, form)
    outputs = OUTPUTS if is_gated else 2 * OUTPUTS
    rng = np.random.default_rng(5)
    bits = rounded(rng.standard_normal((ROWS, INPUTS)).astype(np.float32))
    bits[:, INPUTS // 2 :] = bits[:, : INPUTS // 2]
    bits[:, : INPUTS // 2 : 64] ^= 1
    before = rounded(rng.standard_normal((ROWS, outputs)).astype(np.float32) / 4096)
    x, residual = upload(device, bits), 0 if is_gated else upload(device, before)
    wanted = widened(bits) @ exact.T
    if is_gated:
        gate, up = np.split(wanted, 2, axis=1)
        wanted = gate / (1 + np.exp(-gate)) * up
    else:
        wanted = wanted + widened(before)
    unrolled = 2 if ranges == 4 else 1
    found = []
    for way in (
        Ranged("in_turn", 16, 64, ranges, 4, 3),
        Ranged("together", 8, 16, ranges, 4, 3, unrolled),
        Ranged("together", 16, 32, ranges, 4, 3),
        Ranged("apart", 16, 32, ranges, 4, 3, unrolled),
        Ranged("apart", 16, 32, ranges, 4, 3),
    ):
        y = device.allocate(2 * ROWS * outputs + 64)
        make.ranged(way, x, matrix, y.address, ROWS, residual, is_gated)(0)
        found.append(tiny.floats(y.address, ROWS, outputs))
        assert close(found[-1], wanted), str(way)
        assert np.array_equal(found[-1], found[0]), str(way)
        assert bytes(device.download(y.address + 2 * ROWS * outputs, 64)) == b"\xff" * 64
