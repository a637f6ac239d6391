"""Products of float32 rows with stored weights: the dequantised weights' bits, in any batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.runner.kernels.products.activations import silu_kernel
from engine.runner.kernels.products.linear import (
    DIRECT,
    GATED_TILES,
    PANELS,
    float_tile,
    gated_linear,
    gather_columns,
    linear,
)
from engine.runner.kernels.products.packed import pack_into, packed_bytes
from engine.runner.kernels.products.panel_product import TILE_ROWS
from engine.runner.kernels.vector_ir import LANES
from engine.runner.weights.stored_formats import dequantise
from engine.runner.weights.stored_tensor import GROUP_SIZES, GroupedTensor
from tests.support.models.packing import (
    NONE,
    NONE_2D,
    aligned,
    chained,
    floats,
    normal,
    packed,
    stored,
)

BITS = {
    "F32": 32, "F16": 16, "BF16": 16, "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5,
    "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625, "MXFP4": 4.25,
}  # fmt: skip


def inputs_of(name: str) -> int:
    """An odd number of the format's groups."""
    return 768 if name.endswith("K") else 96 if GROUP_SIZES[name][0] > 1 else 48


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_rows_come_back_bit_for_bit(name: str) -> None:
    tensor, ids = stored(name, 70, inputs_of(name)), np.array([*range(70), 69, 0, 33])
    out = np.empty((73, inputs_of(name)), np.float32)
    gather_columns(packed(tensor).table, ids, out)
    np.testing.assert_array_equal(out.view(np.int32), dequantise(tensor)[ids].view(np.int32))


def test_every_power_of_two_and_every_number_of_mxfp4_comes_back() -> None:
    """The least two powers are subnormal floats, the largest one makes infinities; 255 is NaN."""
    rows = np.zeros((256, 17), np.uint8)
    rows[:, 0] = np.arange(256)
    rows[:, 1:] = np.arange(16) * 17
    tensor, out = GroupedTensor("MXFP4", (256, 32), rows), np.empty((256, 32), np.float32)
    gather_columns(packed(tensor).table, np.arange(256), out)
    with np.errstate(all="ignore"):
        wanted = dequantise(tensor)
    assert wanted[0, 1] == 2.0**-128
    assert np.isinf(wanted[254, 7])
    assert np.isnan(out[255]).all()
    np.testing.assert_array_equal(out[:255].view(np.int32), wanted[:255].view(np.int32))


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_a_product_is_one_chain_for_any_rows_and_threads(name: str) -> None:
    depth = inputs_of(name)
    tensor, x = stored(name, 70, depth), normal(64, depth, seed=1)
    weight = packed(tensor)
    wanted = chained(x, dequantise(tensor))
    for num_rows, num_threads in itertools.product(range(1, 65), (1, 2)):
        out = np.full((num_rows, 70), np.nan, np.float32)
        linear(x[:num_rows], weight.table, NONE, NONE_2D, NONE_2D, out, num_threads)
        np.testing.assert_array_equal(out.view(np.int32), wanted[:num_rows].view(np.int32))


@pytest.mark.parametrize("num_rows", [1, 4, 5, 12, 130])
def test_several_formats_side_by_side_with_bias_and_residual(num_rows: int) -> None:
    tensors = [stored("Q5_0", 64, 256), stored("Q6_K", 32, 256), stored("F16", 48, 256)]
    x, bias = normal(num_rows, 256), normal(144, seed=4)
    out = normal(num_rows, 144, seed=3)
    parts = [chained(x, dequantise(tensor)) for tensor in tensors]
    wanted = (np.concatenate(parts, axis=1) + bias) + out
    linear(x, packed(*tensors).table, bias, out, NONE_2D, out, 2)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("num_rows", [1, 5, 35])
@pytest.mark.parametrize("up_format", ["Q4_1", "Q8_0", "F32"])
def test_gate_and_up_of_one_format_or_two(num_rows: int, up_format: str) -> None:
    gate, up = stored("Q4_1", 96, 96), stored(up_format, 96, 96, seed=1)
    x, bias = normal(num_rows, 96, seed=2), normal(192, seed=3)
    as_floats = packed(floats(dequantise(gate)), floats(dequantise(up)))
    out, wanted = np.empty((2, num_rows, 96), np.float32)
    gated_linear(x, packed(gate, up).table, bias, silu_kernel(), NONE_2D, out, 2)
    gated_linear(x, as_floats.table, bias, silu_kernel(), NONE_2D, wanted, 1)
    np.testing.assert_array_equal(out, wanted)


def test_a_pair_of_two_formats_writes_no_further_than_its_tiles() -> None:
    """A kernel of one panel writes two tiles, the second one behind those of the pair."""
    table = packed(stored("Q4_1", 96, 96), stored("Q8_0", 96, 96, seed=1)).table
    x = normal(2, 96, seed=2)
    tiles = np.full((GATED_TILES + 1, TILE_ROWS, LANES), 7.0, np.float32)
    gate, up = table[0], table[1]
    gate_at, up_at, tiles_at = gate[PANELS], up[PANELS], tiles.ctypes.data
    float_tile(
        gate[DIRECT], up[DIRECT], 2, x.ctypes.data, gate_at, up_at, 96, tiles_at, gate_at, up_at
    )
    assert (tiles[GATED_TILES:] == 7.0).all()
    assert (tiles[1, :2] != 7.0).all()


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_packed_bits_are_near_those_of_the_file_and_always_the_same(name: str) -> None:
    tensor = stored(name, 160, 768)
    described = [(name, tensor.shape)]
    assert packed_bytes(described) * 8 / (160 * 768) == BITS[name]
    first, second = aligned(packed_bytes(described)), aligned(packed_bytes(described))
    second[:] = 255
    pack_into([tensor], first)
    pack_into([tensor], second)
    np.testing.assert_array_equal(first, second)
    read_only = tensor.rows.copy()
    read_only.flags.writeable = False
    pack_into([GroupedTensor(name, tensor.shape, read_only)], second)
    np.testing.assert_array_equal(first, second)
