"""Stored groups: the values and the bytes of llama.cpp's own Python package, bit for bit."""

import math
from fractions import Fraction

import gguf
import numpy as np
import pytest
from gguf import quants

from engine.runner.weights.stored_formats import QUANTISERS, dequantise, quantise
from engine.runner.weights.stored_tensor import GROUP_SIZES, GroupedTensor, row_bytes

SHAPE = (9, 768)


def random_rows(format_name: str, seed: int) -> np.ndarray:
    """Return any bytes as groups: every step, scale and bit occurs, and NaN scales too."""
    size = row_bytes(format_name, SHAPE[1])
    return np.random.default_rng(seed).integers(0, 256, (SHAPE[0], size), np.uint8)


@pytest.mark.parametrize("format_name", GROUP_SIZES)
def test_group_sizes_are_those_of_the_files(format_name: str) -> None:
    kind = gguf.GGMLQuantizationType[format_name]
    assert GROUP_SIZES[format_name] == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("format_name", GROUP_SIZES)
def test_every_group_has_the_reference_values(format_name: str, seed: int) -> None:
    rows = random_rows(format_name, seed)
    values = dequantise(GroupedTensor(format_name, SHAPE, rows))
    assert values.shape == SHAPE
    with np.errstate(all="ignore"):
        wanted = (
            rows.view(np.float32 if format_name == "F32" else np.float16).astype(np.float32)
            if format_name in ("F32", "F16")
            else quants.dequantize(rows, gguf.GGMLQuantizationType[format_name])
        )
    is_number = ~np.isnan(wanted)
    if format_name == "MXFP4":  # the package reads the scale that is NaN as 2 ** 128
        is_number &= np.repeat(rows.reshape(-1, 17)[:, :1] != 255, 32, axis=1).reshape(SHAPE)
    assert is_number.mean() > 0.5
    np.testing.assert_array_equal(np.isnan(values), ~is_number)
    np.testing.assert_array_equal(
        values.view(np.uint32)[is_number], wanted.reshape(SHAPE).view(np.uint32)[is_number]
    )


@pytest.mark.parametrize("format_name", ["Q4_1", "Q6_K"])
def test_rows_in_many_parts_are_the_same(format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = GroupedTensor(format_name, SHAPE, random_rows(format_name, 3))
    whole = dequantise(tensor)
    monkeypatch.setattr(
        "engine.runner.weights.stored_formats._PART_BYTES", 2 * tensor.rows.shape[1]
    )
    np.testing.assert_array_equal(dequantise(tensor), whole)


def test_every_byte_of_mxfp4_has_the_value_of_its_specification() -> None:
    """Each scale with each number, low nibbles first; values beyond float32 are infinite."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = [*magnitudes, *(-value for value in magnitudes)]
    for scale in range(256):
        rows = np.array([[scale, *(low | (15 - low) << 4 for low in range(16))]], np.uint8)
        values = dequantise(GroupedTensor("MXFP4", (1, 32), rows))[0]
        if scale == 255:
            assert np.isnan(values).all()
            continue
        exact = [Fraction(number) * Fraction(2) ** (scale - 127) for number in numbers]
        for value, wanted in zip(values.tolist(), [*exact, *reversed(exact)], strict=True):
            if abs(wanted) < Fraction(2) ** 128:
                assert Fraction(value) == wanted
            else:
                assert value == (math.inf if wanted > 0 else -math.inf)


@pytest.mark.parametrize("format_name", QUANTISERS)
def test_quantised_bytes_are_those_of_the_reference(format_name: str) -> None:
    values = np.random.default_rng(4).normal(size=SHAPE).astype(np.float32)
    values[1], values[2, :32], values[3, 5] = 0.0, 0.25, -70.0
    values[4, 32:64] = np.arange(-16, 16) * 0.5  # exact ties
    tensor = quantise(values, format_name)
    wanted = quants.quantize(values, gguf.GGMLQuantizationType[format_name])
    assert tensor.format == format_name
    np.testing.assert_array_equal(tensor.rows, wanted)
    error = np.abs(dequantise(tensor) - values)[0].max()
    assert error < {"Q8_0": 0.02, "Q5_1": 0.1, "Q5_0": 0.15, "Q4_1": 0.2, "Q4_0": 0.3}[format_name]
