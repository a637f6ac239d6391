"""Weights that are quantised while they are loaded."""

from __future__ import annotations

import hashlib

from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.spec.decoder_tensors import CHOICE_BIAS, EXPERT_GATE
from engine.runner.weights.stored_formats import quantise
from engine.runner.weights.stored_tensor import GROUP_SIZES, GroupedTensor
from engine.runner.weights.tensor_source import TensorSource

_KEPT_AT_8_BITS = ("model.embed_tokens.weight", "lm_head.weight")
"""Rounding these costs the most accuracy, and they are a small part of a large model."""
_KEPT = (f".{EXPERT_GATE}.weight", f".{CHOICE_BIAS}")
"""The ends of names of what chooses experts: rounding it sends tokens to others."""
WIDE_FORMATS = ("F32", "F16", "BF16")
"""The formats that are quantised."""


class QuantisedSource(DerivedWeights):
    """The weights of `source`, of which those of products are in groups of `format_name`.

    Embedding and head are in Q8_0. What is in groups already, norms, biases, weights whose rows are
    no whole groups, and what chooses experts stay as they are.
    """

    def __init__(self, source: TensorSource, format_name: str) -> None:
        """Take the formats from `stored_formats.QUANTISERS`."""
        super().__init__(source)
        self._format = format_name

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        stored, shape = self._source.format_and_shape(name)
        wanted = "Q8_0" if name in _KEPT_AT_8_BITS else self._format
        is_kept = (
            stored not in WIDE_FORMATS
            or len(self._source.shape(name)) != 2
            or name.endswith(_KEPT)
            or shape[1] % GROUP_SIZES[wanted][0] != 0
        )
        return stored if is_kept else wanted, shape

    def grouped(self, name: str) -> GroupedTensor:
        wanted, _ = self.format_and_shape(name)
        if wanted == self._source.format_and_shape(name)[0]:
            return self._source.grouped(name)
        return quantise(self._source.read(name), wanted)

    def identity(self) -> str:
        return hashlib.sha256(f"{self._source.identity()} {self._format}".encode()).hexdigest()
