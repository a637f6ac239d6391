"""What an MLP computes of gate and up: kernels that products call by their addresses.

So a model compiles its own alone. The arguments are the addresses of a tile's sums of gate and of
up, its number of rows, and where sixteen numbers of each row are written, with the bytes between.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.runner.kernels.compiled import compiled_address
from engine.runner.kernels.vector_ir import LANES
from engine.runner.kernels.vector_math import clamped_swish_product, gelu_product, silu_product

_SUMS_BYTES = 4 * LANES


@cache
def silu_kernel() -> int:
    """Return the address of `silu(gate) * up`, which is compiled now or loaded."""

    def silu(gate, up, rows, out, row_bytes, _a, _b, _c):  # type: ignore[no-untyped-def]
        for row in range(rows):
            at = row * _SUMS_BYTES
            silu_product(gate + at, up + at, out + row * row_bytes)

    return compiled_address(silu, "rows")


@cache
def gelu_kernel() -> int:
    """Return the address of `gelu(gate) * up`, GELU by tanh, compiled now or loaded."""

    def gelu(gate, up, rows, out, row_bytes, _a, _b, _c):  # type: ignore[no-untyped-def]
        for row in range(rows):
            at = row * _SUMS_BYTES
            gelu_product(gate + at, up + at, out + row * row_bytes)

    return compiled_address(gelu, "rows")


@cache
def clamped_swish_kernel(steepness: float, limit: float) -> int:
    """Return the address of what `ClampedSwish` describes, which is compiled now or loaded."""
    factor, most = np.float32(steepness), np.float32(limit)

    def clamped_swish(gate, up, rows, out, row_bytes, _a, _b, _c):  # type: ignore[no-untyped-def]
        for row in range(rows):
            at = row * _SUMS_BYTES
            clamped_swish_product(gate + at, up + at, out + row * row_bytes, factor, most)

    return compiled_address(clamped_swish, f"{steepness!r}_{limit!r}")
