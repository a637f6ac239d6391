"""Weights of models that divide their logits: the final norm does it, for every back end."""

from __future__ import annotations

import numpy as np

from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.stored_tensor import GroupedTensor
from engine.runner.weights.tensor_source import TensorSource

_FINAL_NORM = "model.norm.weight"


class DividedLogits(DerivedWeights):
    """The weights of `source`, with the final norm's divided by `divisor`, in float32.

    Logits are products with the normed state, without a bias, so they are divided too.
    """

    def __init__(self, source: TensorSource, divisor: float) -> None:
        """Take `DecoderSpec.logits_divisor`; it reads nothing."""
        super().__init__(source)
        self._divisor = np.float32(divisor)

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        stored, shape = self._source.format_and_shape(name)
        return ("F32" if name == _FINAL_NORM else stored), shape

    def grouped(self, name: str) -> GroupedTensor:
        if name != _FINAL_NORM:
            return self._source.grouped(name)
        values = self.read(name)[None]
        return GroupedTensor("F32", values.shape, values.view(np.uint8))

    def read(self, name: str) -> np.ndarray:
        values = self._source.read(name)
        return values / self._divisor if name == _FINAL_NORM else values
