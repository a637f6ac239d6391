"""Weights in fp8 (e4m3) with float scales: one for all, or for each output, group or tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from engine.runner.weights.schemes.scheme import (
    FLOATS,
    PartOfWeight,
    Scheme,
    Shape,
    Tensors,
    in_parts,
)
from engine.runner.weights.stored_tensor import Float8Tensor


def _e4m3_values() -> np.ndarray:
    """Return the values of all bytes, float32 `[256]`.

    A sign, four bits of exponent (bias 7) and three of mantissa. There are no infinities: the
    largest exponent has numbers up to 448, and one that is none.
    """
    values = np.empty(256, np.float32)
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        if exponent == 15 and mantissa == 7:
            size = np.nan
        values[byte] = np.copysign(size, -1.0 if byte >> 7 else 1.0)
    return values


_VALUES = _e4m3_values()


@dataclass(frozen=True)
class Float8(Scheme):
    """`weight` `[outputs, inputs]` in e4m3, times `weight_scale_inv` or `weight_scale`.

    Both names mean the factor by which a stored number is multiplied. `tile` is (outputs, inputs)
    of the weights that share a scale, 0 for all of them, and tiles at the ends may be cut off;
    None: the shape of the scales says whether there is one, or one for each output.

    A value is a number times its scale, rounded once, to float32. That is exact for scales in
    bfloat16 or float16.
    """

    tile: tuple[int, int] | None
    scale_name: str
    """The name that is usual where this scheme is."""

    stored: ClassVar[str] = "weight"
    stored_dtypes: ClassVar[tuple[str, ...]] = ("F8_E4M3",)
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {"weight_scale", "weight_scale_inv", "weight_zero_point", "input_scale", "activation_scale"}
    )

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        _, (num_outputs, num_inputs) = tensors.form(self.stored)
        return num_outputs, num_inputs

    def parts(self, tensors: Tensors, shape: tuple[int, int]) -> Sequence[PartOfWeight]:
        forms = tuple((FLOATS, one) for one in self._scale_shapes(shape))
        return (
            PartOfWeight(self.stored, ((self.stored_dtypes, shape),)),
            PartOfWeight(self._scale_name(tensors), forms),
        )

    def format(self, tensors: Tensors) -> str:
        return "F32"

    def rows(self, tensors: Tensors, format_name: str) -> np.ndarray:
        num_outputs, num_inputs = shape = self.shape(tensors)
        stored = tensors.read(self.stored)
        scales = tensors.read(self._scale_name(tensors))
        if scales.ndim < 2:
            scales = scales.reshape(-1, 1)
        high, wide = self.tile or (num_outputs // len(scales), num_inputs)
        high, wide = high or num_outputs, wide or num_inputs

        def values(first: int, last: int) -> np.ndarray:
            of_rows = scales[np.arange(first, last) // high]
            widened = np.repeat(of_rows, wide, axis=1)[:, :num_inputs]
            with np.errstate(over="ignore", invalid="ignore"):
                return _VALUES[stored[first:last]] * widened

        return in_parts(shape, values)

    def stored_tiles(self, tensors: Tensors) -> Float8Tensor:
        """Return numbers and scales as they are stored, with one scale for each tile.

        Raises `CheckpointError` for numbers that are none.
        """
        numbers = tensors.read(self.stored)
        if (numbers & 127 == 127).any():
            raise tensors.refuse(self.stored, "has numbers that are NaN: wanted none of them")
        return Float8Tensor(numbers, tensors.read(self._scale_name(tensors)))

    def _scale_name(self, tensors: Tensors) -> str:
        names = ("weight_scale_inv", "weight_scale")
        return next((name for name in names if tensors.has(name)), self.scale_name)

    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        num_outputs, num_inputs = shape
        one: tuple[Shape, ...] = ((1,), (), (1, 1))
        if self.tile is None:
            return (*one, (num_outputs, 1), (num_outputs,))
        if self.tile == (0, 0):
            return one
        high, wide = self.tile[0] or num_outputs, self.tile[1] or num_inputs
        return ((-(-num_outputs // high), -(-num_inputs // wide)),)
