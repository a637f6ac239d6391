"""Norms of files that hold their weights less one, as those of Gemma do."""

from __future__ import annotations

import numpy as np

from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.stored_tensor import GroupedTensor

NORM = "norm.weight"
"""The end of the name of each norm."""


class NormOffsets(DerivedWeights):
    """The weights of `source`, with one added to those of norms, in float32."""

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        stored, shape = self._source.format_and_shape(name)
        return ("F32" if name.endswith(NORM) else stored), shape

    def grouped(self, name: str) -> GroupedTensor:
        if not name.endswith(NORM):
            return self._source.grouped(name)
        values = self.read(name)[None]
        return GroupedTensor("F32", values.shape, values.view(np.uint8))

    def read(self, name: str) -> np.ndarray:
        values = self._source.read(name)
        return values + np.float32(1.0) if name.endswith(NORM) else values
