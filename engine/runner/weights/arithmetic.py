"""What a runner computes in: beside the weights, what the bits of its KV depend on."""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine.runner.weights.spec.decoder_tensors import expected_shapes
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.tensor_source import TensorSource

INT8 = "int8 (steps of 16 and 32)"
"""Activations in int8, in words that change with their bits (`byte_rows`, `PackedPlan.is_fine`)."""
IntegerWeights = tuple[tuple[str, str], ...]
"""Name and format of each weight whose products are computed in integers."""
OrdersOfSums = tuple[tuple[str, str], ...]
"""Name of each weight whose products have an order of their own, and that order."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`operators` are those of the back end, which add in an order of their own.

    `formats` are those in which the decoder's weights of two dimensions are stored. Products in
    float32 have the same bits for all of them; products in integers depend on the format, and so do
    those of a card's quantised weights, which are in `orders`.
    """

    dtype: str
    operators: str
    formats: tuple[str, ...]
    in_integers: IntegerWeights = ()
    orders: OrdersOfSums = ()

    @property
    def with_bytes(self) -> bool:
        """Whether some products take rows in int8."""
        return bool(self.in_integers)

    @property
    def identity(self) -> str:
        """Text that is equal where equal weights give equal bits."""
        text = f"{self.dtype}\n{self.operators}"
        if self.orders:
            text += f"\nproducts in {json.dumps(self.orders)}"
        if not self.with_bytes:
            return text
        return f"{text}\nrows in {INT8} times {json.dumps(self.in_integers)}"

    @property
    def description(self) -> str:
        """What people compare."""
        activations = INT8 if self.with_bytes else self.dtype
        orders = "".join(f", {order}" for order in sorted({order for _, order in self.orders}))
        return (
            f"{self.dtype} on {self.operators}, weights in {' '.join(self.formats)}{orders}, "
            f"activations in {activations}"
        )


def stored_formats(spec: DecoderSpec, source: TensorSource) -> tuple[str, ...]:
    """Return the formats of the decoder's weights of two dimensions, sorted."""
    matrices = [name for name, shape in expected_shapes(spec).items() if len(shape) == 2]
    return tuple(sorted({source.format_and_shape(name)[0] for name in matrices}))
