"""The product with panels of floats, `panel_product`, as a kernel that is called by its address."""

from __future__ import annotations

from functools import cache

from numba import cfunc

from engine.runner.kernels.compiled import SIGNATURE, address_of
from engine.runner.kernels.panel_product import float_product


@cache
def float_kernel() -> int:
    """Return the address of the product, with arguments like `block_product.few_rows_kernel`."""

    @cfunc(SIGNATURE, cache=True)
    def product(rows, a, first, second, depth, c, ahead, second_ahead):  # type: ignore[no-untyped-def]
        float_product(rows, a, first, second, depth, c, ahead, second_ahead)

    return address_of(product)
