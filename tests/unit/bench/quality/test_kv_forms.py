"""The forms of KV that the bench compares: e4m3 as it is defined, and the cache's own."""

from __future__ import annotations

import numpy as np
import pytest

from bench.quality.kv_forms import FORMS, rounded_to_e4m3, scaled_e4m3


def all_e4m3() -> np.ndarray:
    """Return the finite numbers of e4m3 that are not negative, from their bits."""
    numbers = [
        fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for fraction in range(8)
        if (exponent, fraction) != (15, 7)
    ]
    return np.array(numbers, np.float32)


def test_numbers_of_e4m3_stay() -> None:
    numbers = all_e4m3()
    assert numbers.max() == 448
    np.testing.assert_array_equal(rounded_to_e4m3(numbers), numbers)
    np.testing.assert_array_equal(rounded_to_e4m3(-numbers), -numbers)


def test_others_become_the_nearest_and_ties_the_even_one() -> None:
    numbers = all_e4m3()
    middles = (numbers[:-1] + numbers[1:]) / 2
    even = np.where(np.arange(len(middles)) % 2, numbers[1:], numbers[:-1])
    np.testing.assert_array_equal(rounded_to_e4m3(middles), even)
    above = np.nextafter(middles, np.float32(np.inf))
    np.testing.assert_array_equal(rounded_to_e4m3(above), numbers[1:])
    below = np.nextafter(middles, np.float32(-np.inf))
    np.testing.assert_array_equal(rounded_to_e4m3(below), numbers[:-1])
    assert rounded_to_e4m3(np.array([500.0, -1e9], np.float32)).tolist() == [448, -448]


def test_a_scale_takes_the_largest_of_a_row_to_448() -> None:
    rows = np.array([[4480.0, 10.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    np.testing.assert_array_equal(scaled_e4m3(rows), rows)


@pytest.mark.parametrize("name", FORMS)
def test_forms_keep_shapes_and_stay_near(name: str) -> None:
    rows = np.random.default_rng(1).standard_normal((2, 3, 5, 64)).astype(np.float32)
    found = FORMS[name](rows)
    assert found.shape == rows.shape
    error = np.abs(found - rows).max()
    assert 0 < error < 0.25


def test_a_scaled_byte_is_nearer_than_e4m3() -> None:
    rows = np.random.default_rng(1).standard_normal((1000, 64)).astype(np.float32)
    errors = {name: float(np.square(form(rows) - rows).mean()) for name, form in FORMS.items()}
    assert errors["bfloat16"] < errors["int8_scaled"] < errors["fp8_scaled"] < errors["fp8"]
