"""Products of quantised weights: right, and the same bits in every tile and for any rows."""

from __future__ import annotations

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip

import numpy as np
import pytest

from common.errors import ConfigError
from engine.runner.gpu.repacking import repacked
from engine.runner.gpu.tiles import Tile, fitted, gate_up_tile, num_ranges, product_tile
from engine.runner.gpu.weights import STRIP_INPUTS, Form, Matrix
from engine.runner.weights.stored_formats import dequantise
from engine.runner.weights.stored_tensor import GroupedTensor
from tests.gpu_kernels.interpreted import rounded, widened
from tests.gpu_kernels.tiny_decoder import TinyDecoder
from tests.gpu_kernels.uploaded import upload

ROWS = 5
QUANTISED = [form for form in Form if form is not Form.BF16]
SHAPES = [(40, 1024, 8), (40, 512, 4), (136, 768, 2), (40, 384, 1)]
"""Outputs that no tile divides, inputs, and the ranges that these have in INT4."""
IN_GROUPS = [form for form in QUANTISED if form.group_inputs == 32]


@pytest.fixture(scope="module")
def tiny() -> TinyDecoder:
    return TinyDecoder()


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Return the numbers of e4m3 codes, without those of NaN."""
    exponent, fraction = (codes >> 3) & 15, codes & 7
    size = np.where(exponent, 2.0 ** (exponent - 7.0) * (1 + fraction / 8), fraction / 512)
    signed: np.ndarray = np.where(codes > 127, -size, size)
    return signed


def mirrored(values: np.ndarray) -> np.ndarray:
    """Return groups [outputs or blocks, groups, ..] whose last half repeats the first one."""
    values[:, -(values.shape[1] // 2) :] = values[:, : values.shape[1] // 2]
    return values


def stored(
    device: InterpretedDevice, form: Form, outputs: int, inputs: int
) -> tuple[Matrix, np.ndarray]:
    """Return random weights, and the same as float64 [outputs, inputs].

    The last groups of an output's weights are the first ones' negatives: sums nearly cancel, so
    that another order of additions shows in the few bits of a result.
    """
    rng = np.random.default_rng(int(form))
    if form.group_inputs == 32:
        return stored_groups(device, form, outputs, inputs)
    groups = inputs // STRIP_INPUTS
    half = groups // 2
    if form is Form.FP8:
        codes = rng.integers(0, 256, (outputs, groups, 2, 64), dtype=np.uint8)
        codes[codes & 127 == 127] = 0
        mirrored(codes)
        scales = mirrored(rng.standard_normal((-(-outputs // 128), groups)).astype(np.float32))
        scales[:, groups - half :] *= -1
        packed = np.ascontiguousarray(codes.transpose(0, 1, 3, 2))
        matrix = Matrix(upload(device, packed), outputs, inputs, form, upload(device, scales))
        wide = np.repeat(scales, 128, 0)[:outputs, :, None, None]
        return matrix, (e4m3(codes.astype(int)) * wide).reshape(outputs, inputs)
    numbers = mirrored(rng.integers(0, 16, (outputs, groups, 4, 32), dtype=np.uint16))
    words = np.zeros((outputs, groups, 32), np.uint16)
    for part in range(4):
        words |= numbers[:, :, part] << (4 * part)
    bits = mirrored(rounded(rng.standard_normal((outputs, groups)).astype(np.float32)))
    bits[:, groups - half :] ^= 0x8000
    matrix = Matrix(upload(device, words), outputs, inputs, form, upload(device, bits))
    values = (numbers.astype(np.float64) - 8) * widened(bits)[:, :, None, None]
    return matrix, values.reshape(outputs, inputs)


def stored_groups(
    device: InterpretedDevice, form: Form, outputs: int, inputs: int
) -> tuple[Matrix, np.ndarray]:
    """Return weights in groups of a GGUF file, whose every four scales differ."""
    rng = np.random.default_rng(int(form))
    size = (1 if form is Form.MXFP4 else 2) + 4 * form.bits
    blocks = rng.integers(0, 256, (outputs, inputs // 32, size), dtype=np.uint8)
    if form is Form.MXFP4:
        blocks[..., 0] = rng.integers(122, 132, (outputs, inputs // 32))
    else:
        scales = rng.standard_normal((outputs, inputs // 32)).astype(np.float16)
        blocks[..., :2] = scales[..., None].view(np.uint8).reshape(outputs, -1, 2)
    if inputs % STRIP_INPUTS == 0:
        blocks = mirrored(blocks.reshape(outputs, -1, 4 * size))
        half = blocks.shape[1] // 2
        own = blocks[:, blocks.shape[1] - half :].reshape(outputs, half, 4, size)
        if form is Form.MXFP4:
            own[..., 1:] ^= 0x88  # the sign of each number
        else:
            own[..., 1] ^= 0x80  # the sign of the scale
        blocks[:, blocks.shape[1] - half :] = own.reshape(outputs, half, -1)
    rows = np.ascontiguousarray(blocks.reshape(outputs, -1))
    words, halves = repacked(form, rows)
    matrix = Matrix(upload(device, words), outputs, inputs, form, upload(device, halves))
    assert matrix.weight_bytes == words.nbytes
    assert matrix.scale_bytes == halves.nbytes
    values = dequantise(GroupedTensor(form.name, (outputs, inputs), rows))
    return matrix, values.astype(np.float64)


def rows_of(count: int, inputs: int) -> np.ndarray:
    """Return rows [count, inputs] whose last groups repeat the first ones but for a few bits."""
    bits = rounded(np.random.default_rng(5).standard_normal((count, inputs)).astype(np.float32))
    if inputs % STRIP_INPUTS == 0:
        grouped = mirrored(bits.reshape(count, inputs // STRIP_INPUTS, STRIP_INPUTS))
        grouped[:, 0, ::64] ^= 1
    return bits


def tiles_of(matrix: Matrix, rows: int, *, is_gated: bool) -> list[Tile]:
    """Return the tile that is shipped, and others."""
    choose = gate_up_tile if is_gated else product_tile
    outputs = matrix.num_outputs // (2 if is_gated else 1)
    deeper = fitted(Tile(16, 64, 256, 4, 3), matrix).depth
    return [
        choose(rows, outputs, matrix), Tile(16, 64, 128, 4, 3), Tile(64, 32, deeper, 4, 3),
        Tile(8, 16, deeper, 4, 3, is_together=True), Tile(32, 32, 128, 4, 3, is_together=True),
    ]  # fmt: skip


@pytest.mark.parametrize(("outputs", "inputs", "ranges"), SHAPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("form", QUANTISED)
def test_every_tile_has_the_same_bits(
    tiny: TinyDecoder, form: Form, is_gated: bool, outputs: int, inputs: int, ranges: int
) -> None:
    compare_tiles(tiny, form, outputs, inputs, ranges, is_gated=is_gated)


@pytest.mark.parametrize(("inputs", "ranges"), [(1888, 8), (1120, 2), (32, 1)])
@pytest.mark.parametrize("form", IN_GROUPS)
def test_inputs_are_whole_groups_and_not_always_whole_strips(
    tiny: TinyDecoder, form: Form, inputs: int, ranges: int
) -> None:
    """Ranges whose last one is as long as the others, or shorter."""
    compare_tiles(tiny, form, 40, inputs, ranges, is_gated=inputs == 1120)


def compare_tiles(
    tiny: TinyDecoder, form: Form, outputs: int, inputs: int, ranges: int, *, is_gated: bool
) -> None:
    """Compare the tiles' results with each other, and with float64."""
    device = tiny.device
    matrix, exact = stored(device, form, outputs * (2 if is_gated else 1), inputs)
    assert num_ranges(matrix) == min(ranges, 4 if form.bits == 8 else 8)
    bits = rows_of(ROWS, inputs)
    before = rounded(np.random.default_rng(6).standard_normal((ROWS, outputs)).astype(np.float32))
    before[:, ::2] = 0  # so that a residual hides no bit of those
    x, residual = upload(device, bits), upload(device, before)
    wanted = widened(bits) @ exact.T
    if is_gated:
        gate, up = np.split(wanted, 2, axis=1)
        with np.errstate(over="ignore"):
            wanted = gate / (1 + np.exp(-gate)) * up
    else:
        wanted = wanted + widened(before)
    found = []
    for tile in tiles_of(matrix, ROWS, is_gated=is_gated):
        y = device.allocate(2 * ROWS * outputs + 64)
        make = tiny.launches(tile)
        if is_gated:
            make.gate_up(x, matrix, y.address, ROWS, tile)(0)
        else:
            make.product(x, matrix, y.address, ROWS, residual=residual, tile=tile)(0)
        found.append(tiny.floats(y.address, ROWS, outputs))
        # Of sums that nearly cancel, four numbers are rounded to bfloat16.
        error = np.linalg.norm(found[-1] - wanted) / np.linalg.norm(wanted)
        assert error < 8e-3, str(tile)
        assert np.array_equal(found[-1], found[0]), str(tile)
        assert bytes(device.download(y.address + 2 * ROWS * outputs, 64)) == b"\xff" * 64


@pytest.mark.parametrize("form", QUANTISED)
def test_a_row_has_the_same_bits_among_any_number_of_rows(tiny: TinyDecoder, form: Form) -> None:
    """In the tile that is shipped for so many: of a step, and of a prompt."""
    device, outputs, inputs = tiny.device, 16, 1024
    matrix, _ = stored(device, form, outputs, inputs)
    x = upload(device, rows_of(70, inputs))
    found = []
    for rows in (1, 9, 20, 40, 70):
        y = device.allocate(2 * rows * outputs)
        tile = product_tile(rows, outputs, matrix)
        tiny.launches(tile).product(x, matrix, y.address, rows, tile=tile)(0)
        found.append(tiny.floats(y.address, rows, outputs)[0])
        assert np.array_equal(found[-1], found[0]), rows


@pytest.mark.parametrize("form", QUANTISED)
def test_results_in_float32_are_exact_sums(tiny: TinyDecoder, form: Form) -> None:
    """A head's logits, which nothing rounds."""
    device, outputs, inputs = tiny.device, 40, 384
    matrix, exact = stored(device, form, outputs, inputs)
    bits = rows_of(3, inputs)
    y = device.allocate(4 * 3 * outputs)
    tile = product_tile(3, outputs, matrix)
    make = tiny.launches(tile)
    make.product(upload(device, bits), matrix, y.address, 3, is_float=True, tile=tile)(0)
    raw = device.download(y.address, 4 * 3 * outputs)
    found = np.frombuffer(raw, np.float32).reshape(3, outputs)
    sizes = np.abs(widened(bits)) @ np.abs(exact).T
    assert (np.abs(found - widened(bits) @ exact.T) <= 1e-6 * sizes).all()


@pytest.mark.parametrize("form", QUANTISED)
def test_inputs_that_are_no_whole_groups_are_refused(form: Form) -> None:
    with pytest.raises(ConfigError, match=rf"200 inputs.*multiple of {form.group_inputs}"):
        product_tile(1, 64, Matrix(0, 64, 200, form))


def test_numbers_and_scales_of_mxfp4_have_their_exact_values(tiny: TinyDecoder) -> None:
    """Each of the 16 codes with each scale, far below the numbers that float32 has whole."""
    device = tiny.device
    rows = np.zeros((256, 17), np.uint8)
    rows[:, 0] = np.arange(256)
    rows[:, 1:] = np.arange(16) | np.arange(15, -1, -1) << 4
    words, scales = repacked(Form.MXFP4, rows)
    matrix = Matrix(upload(device, words), 256, 32, Form.MXFP4, upload(device, scales))
    x, y = upload(device, rounded(np.eye(32, dtype=np.float32))), device.allocate(4 * 32 * 256)
    tile = product_tile(32, 256, matrix)
    tiny.launches(tile).product(x, matrix, y.address, 32, is_float=True, tile=tile)(0)
    found = np.frombuffer(device.download(y.address, 4 * 32 * 256), np.float32).reshape(32, 256)
    wanted = dequantise(GroupedTensor("MXFP4", (256, 32), rows))
    assert np.array_equal(found.T[:255], wanted[:255])
    assert np.isnan(found.T[255]).all()


@pytest.mark.parametrize("outputs", [1024, 4096, 24576])
def test_ranges_depend_on_the_form_and_the_inputs_alone(outputs: int) -> None:
    assert num_ranges(Matrix(0, outputs, 4096, Form.INT4)) == 8
    assert num_ranges(Matrix(0, outputs, 4096, Form.FP8)) == 4
    assert num_ranges(Matrix(0, outputs, 2560, Form.INT4)) == 4
    assert num_ranges(Matrix(0, outputs, 2880, Form.MXFP4)) == 8
