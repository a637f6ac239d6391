"""Weights without divisions, and shortlists by a value, are the same to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from engine.runner.kernels.sampling import sample_rows
from engine.runner.kernels.sampling.row_scan import least_shallow
from engine.runner.kernels.sampling.sample_rows import Scratch
from engine.runner.kernels.sampling.top_p_weights import (
    SHALLOW_ROW,
    SHORTLIST_DEPTHS,
    write_weights,
)
from engine.runner.kernels.vector_ir import LANES

TEMPERATURES = st.one_of(
    st.sampled_from([1e-5, 0.1, 0.7, 0.8, 1.0, 1.3, 2.0]),
    st.floats(2.0**-16, 3.0, width=32),
    st.floats(2.0**-20, 2.0**40, width=32),
)
HIGH_TEMPERATURES = st.sampled_from([2.0**20, 2.0**60, 2.0**126, 2.0**127, 3e38])
SCALES = st.sampled_from([0.0, 1e-45, 1e-38, 1e-30, 1e-12, 1e-3, 1.0, 8.0, 1e10, 1e30, 3e38])


@njit  # type: ignore[untyped-decorator]
def weigh(depths, weights) -> None:  # type: ignore[no-untyped-def]
    write_weights(depths.ctypes.data, weights.ctypes.data, len(depths) // 16)


@njit
def total_weight(values, temperature, depths, weights, sums, shallow):  # type: ignore[no-untyped-def]
    largest, floor, at = values.max(), values.min(), values.ctypes.data
    return sample_rows.total_weight(
        values, largest, floor, temperature, depths, weights, sums, shallow, at
    )


def row(seed: int, size: int, scale: float, offset: float) -> np.ndarray:
    """A row with equal values, an infinite depth, and depths of one unit in the last place."""
    rng = np.random.default_rng(seed)
    values = np.clip(rng.normal(size=size) * scale + offset, -3.2e38, 3.2e38).astype(np.float32)
    largest = values.max()
    values[rng.integers(size, size=size // 8)] = np.nextafter(largest, np.float32(-np.inf))
    if seed % 2:  # then there is a weight of 0
        values[rng.integers(size)] = -np.inf
    values[rng.integers(size)] = largest
    return values


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 200),
    scale=SCALES,
    offset=st.sampled_from([0.0, 0.0, 17.0, -40.0, 1e-20, 1e20]),
    temperature=TEMPERATURES | HIGH_TEMPERATURES,
)
def test_the_total_weight_is_that_of_depths_by_division(
    seed: int, size: int, scale: float, offset: float, temperature: float
) -> None:
    values, divisor = row(seed, size, scale, offset), np.float32(temperature)
    with np.errstate(over="ignore"):
        depths = (values.max() - values) / divisor
    padded = np.full(-(-size // LANES) * LANES, np.inf, np.float32)
    padded[:size] = depths
    weights = np.zeros_like(padded)
    weigh(padded, weights)
    chains = np.zeros(LANES, np.float64)
    for vector in weights.reshape(-1, LANES):
        chains += vector
    scratch = Scratch(size, 1)
    total = total_weight(
        values, divisor, scratch.depths[0], scratch.weights[0], scratch.sums[0], scratch.shallow[0]
    )
    assert total == sum(chains.tolist())
    for number, within in enumerate(SHORTLIST_DEPTHS):
        share = weights[padded < np.float32(within)].sum(dtype=np.float64)
        assert np.isclose(scratch.shallow[0, number, 0], share, rtol=1e-4)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    scale=SCALES,
    offset=st.sampled_from([0.0, 17.0, -40.0, 1e-20, 1e20]),
    temperature=TEMPERATURES,
    within=st.sampled_from(SHORTLIST_DEPTHS),
)
def test_a_value_divides_the_shallow_from_the_others(
    seed: int, scale: float, offset: float, temperature: float, within: float
) -> None:
    values, divisor = row(seed, 64, scale, offset), np.float32(temperature)
    largest = values.max()
    least = np.float32(least_shallow(largest, divisor, np.float32(within)))
    around = [np.nextafter(least, np.float32(side)) for side in (-np.inf, np.inf)]
    values = np.array([*values, least, *around], np.float32)
    values = values[values <= largest]
    with np.errstate(over="ignore"):
        is_shallow = (largest - values) / divisor < np.float32(within)
    assert (is_shallow == (values >= least)).all()


@pytest.mark.parametrize("deepest", [80.0, SHALLOW_ROW, 87.0, 88.0, 95.0, 103.5])
def test_the_total_weight_of_a_row_whose_deepest_weights_have_fewer_bits(deepest: float) -> None:
    depths = np.linspace(0.0, deepest, 160, dtype=np.float32)
    depths[:144] = deepest
    weights = np.zeros_like(depths)
    weigh(depths, weights)
    depths[0], weights[0] = 0.0, 1.0
    # The likeliest token has a chain of its own, or the others would be too light to count.
    chains = weights.astype(np.float64).reshape(-1, LANES)
    scratch = Scratch(len(depths), 1)
    total_weight(
        -depths, np.float32(1.0), scratch.depths[0], scratch.weights[0], scratch.sums[0],
        scratch.shallow[0],
    )  # fmt: skip
    expected = np.zeros(LANES)
    for vector in chains:
        expected += vector
    assert scratch.sums[0].tolist() == expected.tolist()
