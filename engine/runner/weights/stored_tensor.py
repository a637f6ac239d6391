"""A weight in the bits in which its file stores it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GROUP_SIZES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}
"""The formats: values of a group, and its bytes. The layouts are those of llama.cpp (ggml), where
a group is a block."""


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A matrix `shape` = (outputs, inputs) in `format`, a key of `GROUP_SIZES`.

    `rows` is uint8 `[outputs, bytes of a row]`, C-contiguous, and possibly a mapped file.
    """

    format: str
    shape: tuple[int, int]
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class Float8Tensor:
    """A matrix in fp8: `numbers`, uint8 `[outputs, inputs]`, are e4m3, none of them NaN.

    `scales`, float32, has one for each tile of `FLOAT8_TILE` outputs and inputs, fewer at the ends.
    """

    numbers: np.ndarray
    scales: np.ndarray


FLOAT8_TILE = 128


def row_bytes(format_name: str, num_inputs: int) -> int:
    """Return the bytes of a row; `num_inputs` is a multiple of the format's group."""
    group_values, group_bytes = GROUP_SIZES[format_name]
    return num_inputs // group_values * group_bytes
