"""What a runner computes in: beside the weights, what the bits of its KV depend on."""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine.runner.cpu.packed_weights import PackedPlan, decoder_plans
from engine.runner.weights.model_spec import DecoderSpec
from engine.runner.weights.quantised_source import WIDE_FORMATS
from engine.runner.weights.tensor_source import TensorSource

INT8 = "int8 (steps of 16 and 32)"
"""Activations in int8, in words that change with their bits (`byte_rows`, `PackedPlan.is_fine`)."""
IntegerWeights = tuple[tuple[str, str], ...]
"""Name and format of each weight whose products are computed in integers."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`operators` are those of the back end, which add in an order of their own.

    `formats` are those in which the decoder's weights of two dimensions are stored. Products in
    float32 have the same bits for all of them; products in integers depend on the format.
    """

    dtype: str
    operators: str
    formats: tuple[str, ...]
    in_integers: IntegerWeights = ()

    @property
    def with_bytes(self) -> bool:
        """Whether some products take rows in int8."""
        return bool(self.in_integers)

    @property
    def identity(self) -> str:
        """Text that is equal where equal weights give equal bits."""
        text = f"{self.dtype}\n{self.operators}"
        if not self.with_bytes:
            return text
        return f"{text}\nrows in {INT8} times {json.dumps(self.in_integers)}"

    @property
    def description(self) -> str:
        """What people compare."""
        activations = INT8 if self.with_bytes else self.dtype
        return (
            f"{self.dtype} on {self.operators}, weights in {' '.join(self.formats)}, "
            f"activations in {activations}"
        )


def stored_formats(spec: DecoderSpec, source: TensorSource) -> tuple[str, ...]:
    """Return the formats of the decoder's weights of two dimensions, sorted."""
    plans = decoder_plans(spec)
    return tuple(sorted({name for plan in plans for name, _ in plan.formats_and_shapes(source)}))


def decoder_products(spec: DecoderSpec) -> list[PackedPlan]:
    """Return the packed weights of a decoder that are multiplied, and not only looked up."""
    is_looked_up = "" if spec.has_tied_embeddings else "embedding"
    return [plan for plan in decoder_plans(spec) if plan.key != is_looked_up]


def integer_weights(source: TensorSource, plans: list[PackedPlan]) -> IntegerWeights:
    """Return the weights whose products are computed in integers if activations are in int8.

    `packed_view` leaves packed weights alone of which one has no blocks.
    """
    found: list[tuple[str, str]] = []
    for plan in plans:
        formats = [name for name, _ in plan.formats_and_shapes(source)]
        if not set(formats).intersection(WIDE_FORMATS):
            found += zip(plan.names, formats, strict=True)
    return tuple(found)
