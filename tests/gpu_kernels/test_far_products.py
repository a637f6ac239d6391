"""Products whose rows or weights lie further from their addresses than 32 bits count."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, rounded  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.kernels.random_numbers import fill_bytes, fill_normal
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import Launches
from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import STRIP_INPUTS, Form, Matrix
from tests.gpu_kernels.far_memory import LastProgram, array_at, behind, sparse
from tests.gpu_kernels.tiny_decoder import SHAPE, SPEC

ROWS, OUTPUTS, INPUTS = 5, 64, 256
"""What one program computes."""
FAR_ROWS = 16 * (2**31 // OUTPUTS // 16 + 1) + ROWS
FAR_OUTPUTS = 128 * (2**31 // (INPUTS // 4) // 128 + 2)
"""Rows of weights of 4 bits, as numbers of 16 bits."""
PLAIN, DESCRIBED = Tile(16, OUTPUTS, 128, 4, 3), Tile(16, OUTPUTS, 64, 4, 3, is_described=True)
TOGETHER = Tile(16, OUTPUTS, 128, 4, 3, is_together=True)
TILES = [(Form.BF16, PLAIN), (Form.BF16, DESCRIBED)] + [
    (form, tile) for form in Form if form is not Form.BF16 for tile in (PLAIN, TOGETHER)
]


def launches() -> Launches:
    nothing: Any = None
    return Launches(LastProgram, InterpretedDevice.properties, SPEC, nothing, nothing, SHAPE)


def bfloat16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rounded(rng.standard_normal(shape).astype(np.float32)).reshape(shape)


def words_of(rng: np.random.Generator, form: Form) -> np.ndarray:
    """Return the weights of OUTPUTS outputs."""
    if form is Form.BF16:
        return bfloat16(rng, OUTPUTS, INPUTS)
    words = rng.integers(0, 1 << 16, (OUTPUTS, INPUTS * form.bits // 16)).astype(np.uint16)
    return words & 0xBFBF if form is Form.FP8 else words


def scales_of(rng: np.random.Generator, form: Form) -> np.ndarray:
    """Return the scales of OUTPUTS outputs, of which fp8 has one for them all."""
    strips = INPUTS // STRIP_INPUTS
    if form is Form.FP8:
        return rng.uniform(0.5, 1.0, (1, strips)).astype(np.float32)
    if form is Form.INT4:
        return bfloat16(rng, OUTPUTS, strips)
    if form is Form.MXFP4:
        return rng.integers(120, 124, (OUTPUTS, 4 * strips), dtype=np.uint8)
    return rng.uniform(0.01, 0.1, (OUTPUTS, 4 * strips)).astype(np.float16)


def stored(stack: ExitStack, form: Form, num_outputs: int, *, is_gated: bool) -> Matrix:
    """Return weights of which the last OUTPUTS outputs are there, of gate and of up."""
    rng = np.random.default_rng(int(form))
    width = 2 if is_gated else 1
    words = words_of(rng, form)
    address = behind(stack, width * num_outputs * words.shape[1] - words.size, words)
    scales = 0
    if form is not Form.BF16:
        own = scales_of(rng, form)
        # Outputs that share a scale, or have their own.
        each = STRIP_INPUTS if form is Form.FP8 else 1
        count = -(-num_outputs // each) * own.shape[1]
        scales = behind(stack, width * count - own.size, own)
    if is_gated:
        gate = address + words.itemsize * (num_outputs * words.shape[1] - words.size)
        array_at(gate, words.size, np.uint16)[:] = words.ravel()[::-1] & 0xBFBF
        if scales:
            at = scales + own.itemsize * (count - own.size)
            array_at(at, own.size, own.dtype)[:] = own.ravel()
    return Matrix(address, width * num_outputs, INPUTS, form, scales)


def result(
    form: Form, tile: Tile, num_rows: int, num_outputs: int, *, is_gated: bool
) -> np.ndarray:
    """Return the last [ROWS, OUTPUTS] of a product of the same rows and weights."""
    rng = np.random.default_rng(3)
    with ExitStack() as stack:
        matrix = stored(stack, form, num_outputs, is_gated=is_gated)
        x = behind(stack, (num_rows - ROWS) * INPUTS, bfloat16(rng, ROWS, INPUTS))
        y = stack.enter_context(sparse(2 * num_rows * num_outputs))
        make = launches()
        if is_gated:
            make.gate_up(x, matrix, y, num_rows, tile=tile)(0)
        else:
            before = bfloat16(rng, OUTPUTS)
            residual = behind(stack, num_rows * num_outputs - OUTPUTS, before)
            make.product(x, matrix, y, num_rows, residual=residual, tile=tile)(0)
        last = [
            y + 2 * ((row + 1) * num_outputs - OUTPUTS) for row in range(num_rows - ROWS, num_rows)
        ]
        return np.array([array_at(at, OUTPUTS, np.uint16).copy() for at in last])


@pytest.mark.parametrize("is_gated", [False, True], ids=["product", "gate and up"])
@pytest.mark.parametrize(("form", "tile"), TILES)
def test_far_rows_and_far_weights_are_multiplied(form: Form, tile: Tile, is_gated: bool) -> None:
    near = result(form, tile, ROWS, OUTPUTS, is_gated=is_gated)
    assert near.any(axis=1).all()
    far_rows = result(form, tile, FAR_ROWS, OUTPUTS, is_gated=is_gated)
    assert np.array_equal(far_rows, near)
    far_outputs = result(form, tile, ROWS, FAR_OUTPUTS, is_gated=is_gated)
    assert np.array_equal(far_outputs, near)


@pytest.mark.parametrize(("function", "kind"), [(fill_normal, "*bf16"), (fill_bytes, "*u32")])
def test_far_random_numbers_are_written(function: Any, kind: str) -> None:
    size, count = 128, 2**32 + 5
    itemsize = 4 if function is fill_bytes else 2
    types = {"out": kind, "seed": "i64", "scale": "fp32", "count": "i64", "mask": "i64"}
    given = (0xFFFFFFFF,) if function is fill_bytes else ()
    kernel = LastProgram(KernelSpec(function, types, {"SIZE": size}))
    with sparse(itemsize * (count + 64)) as out:
        scaled = (count, *given) if given else (1.0, count)
        kernel.bind((-(-count // (4 * size)),), out, 7 << 32, *scaled)(0)
        assert array_at(out + itemsize * 2**32, 5 * itemsize // 2, np.uint16).any()
        assert not array_at(out + itemsize * count, 64, np.uint16).any()
