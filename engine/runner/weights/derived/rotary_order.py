"""Weights of query and key heads in the order in which all back ends rotate them.

Back ends rotate the pairs (i, i + half) of a head. Files have other pairs: neighbours
(`is_rope_interleaved`), or pairs of the first `rotated_dim` dimensions only. Query and key heads
are only ever multiplied with each other, so reordering both alike changes no score, and one
rotation serves every family. Dimensions that are not rotated become pairs whose angle is zero
(`rope.rotary_tables`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.rope import head_order
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.stored_tensor import (
    FLOAT8_TILE,
    GROUP_SIZES,
    Float8Tensor,
    GroupedTensor,
)
from engine.runner.weights.tensor_source import TensorSource

_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")


def in_rotary_order(source: TensorSource, spec: DecoderSpec) -> TensorSource:
    """Return `source` with the heads of queries and keys reordered, where its order is another."""
    order = head_order(spec)
    return source if order is None else RotaryOrder(source, order)


class RotaryOrder(DerivedWeights):
    """The weights of `source`, in which dimension i of a query or key head is `order[i]`."""

    def __init__(self, source: TensorSource, order: np.ndarray) -> None:
        """Take an order of `rope.head_order`; it reads nothing."""
        super().__init__(source)
        self._order = order

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        stored, shape = self._source.format_and_shape(name)
        return ("F32" if self._is_row_of_groups(name, stored) else stored), shape

    def grouped(self, name: str) -> GroupedTensor:
        if not _has_heads(name):
            return self._source.grouped(name)
        stored, shape = self._source.format_and_shape(name)
        if self._is_row_of_groups(name, stored):
            return GroupedTensor("F32", shape, self.read(name)[None].view(np.uint8))
        whole = self._source.grouped(name)
        rows = whole.rows
        if len(self._source.shape(name)) == 1:  # a single row: its numbers are reordered
            rows = rows.reshape(-1, GROUP_SIZES[stored][1])
        return replace(whole, rows=self._reordered(rows).reshape(whole.rows.shape))

    def has_float8(self, name: str) -> bool:
        """Return whether `float8` has this weight: heads have to lie within the tiles' outputs."""
        is_within = not _has_heads(name) or FLOAT8_TILE % len(self._order) == 0
        return is_within and self._source.has_float8(name)

    def float8(self, name: str) -> Float8Tensor:
        stored = self._source.float8(name)
        if not _has_heads(name):
            return stored
        return Float8Tensor(numbers=self._reordered(stored.numbers), scales=stored.scales)

    def read(self, name: str) -> np.ndarray:
        values = self._source.read(name)
        return self._reordered(values) if _has_heads(name) else values

    def _is_row_of_groups(self, name: str, stored: str) -> bool:
        """Return whether a bias or norm is in groups of numbers, which an order would tear."""
        is_row = _has_heads(name) and len(self._source.shape(name)) == 1
        return is_row and GROUP_SIZES[stored][0] > 1

    def _reordered(self, values: np.ndarray) -> np.ndarray:
        """Return `values`, whose first axis has all dimensions of one head after the other."""
        heads = values.reshape(-1, len(self._order), *values.shape[1:])
        return np.ascontiguousarray(heads[:, self._order]).reshape(values.shape)


def _has_heads(name: str) -> bool:
    return name.rpartition(".")[0].endswith(_PARTS)
