"""Tiles of products of unpacked operands, as they are compiled on other processors too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from engine.runner.kernels.products.tile_product import MAX_TILE_ROWS, tile_products
from engine.runner.kernels.vector_ir import LANES
from tests.support.models.packing import chained, normal

NUM_VECTORS, DEPTH = 3, 7


def compiled(wide_vectors: int) -> Any:
    """A kernel that uses tiles of one vector and of `wide_vectors`, as attention does."""
    wide, narrow = tile_products(wide_vectors), tile_products(1)

    @njit(error_model="numpy")
    def product(rows, a, b, c):  # type: ignore[no-untyped-def]
        columns, depth, first = b.shape[1], b.shape[0], 0
        while first < columns:
            at = 4 * first
            if columns - first >= 16 * wide_vectors:
                wide(
                    rows, a.ctypes.data, depth, b.ctypes.data + at, columns, depth,
                    c.ctypes.data + at, columns, 0,
                )  # fmt: skip
                first += 16 * wide_vectors
            else:
                narrow(
                    rows, a.ctypes.data, depth, b.ctypes.data + at, columns, depth,
                    c.ctypes.data + at, columns, 0,
                )  # fmt: skip
                first += 16

    return product


@pytest.mark.parametrize("wide_vectors", [1, 2])
def test_the_widest_tile_may_be_the_narrowest(wide_vectors: int) -> None:
    """Without AVX-512 it is."""
    product = compiled(wide_vectors)
    a, b = normal(MAX_TILE_ROWS, DEPTH), normal(DEPTH, NUM_VECTORS * LANES, seed=1)
    wanted = chained(a, np.ascontiguousarray(b.T))
    for rows in range(1, MAX_TILE_ROWS + 1):
        found = np.empty((rows, NUM_VECTORS * LANES), np.float32)
        product(rows, a, b, found)
        np.testing.assert_array_equal(found, wanted[:rows])
