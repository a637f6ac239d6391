"""Weights of files that have several projections in one tensor, one below the other.

Phi-3 and Phi-4 store query, key and value as one matrix, and gate and up as one, which GLM-4 does
too. Here each of them is a tensor of its own, of which no row is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.stored_tensor import FLOAT8_TILE, Float8Tensor, GroupedTensor
from engine.runner.weights.tensor_source import TensorSource

Shapes = Mapping[str, tuple[int, ...]]

Fused = Mapping[str, tuple[str, ...]]
"""The projections that a tensor of this name has, in the order of its rows."""

_QKV: Fused = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
_GATE_UP: Fused = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_OF_ARCHITECTURES: Mapping[str, Fused] = {
    "Phi3ForCausalLM": {**_QKV, **_GATE_UP},
    "GlmForCausalLM": _GATE_UP,
    "Glm4ForCausalLM": _GATE_UP,
}


def fused_projections(architecture: str) -> Fused:
    """Return what files of this architecture have in one tensor; empty: no two projections."""
    return _OF_ARCHITECTURES.get(architecture, {})


def _fused_name(name: str, fused: Fused) -> str:
    """Return the name of the tensor that has the weight `name`; it may be the same."""
    for whole, parts in fused.items():
        for part in parts:
            if name.endswith(f".{part}.weight"):
                return name.removesuffix(f"{part}.weight") + f"{whole}.weight"
    return name


def fused_shapes(shapes: Shapes, fused: Fused) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the files, by name, in the order of their first parts."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        whole = _fused_name(name, fused)
        before = found[whole][0] if whole in found else 0
        found[whole] = (before + shape[0], *shape[1:])
    return found


class FusedWeights(DerivedWeights):
    """The weights of `shapes`, out of `source`, which has some of them in one tensor."""

    def __init__(self, source: TensorSource, shapes: Shapes, fused: Fused) -> None:
        """Find the rows of each weight; it reads nothing."""
        super().__init__(source)
        self._fused = fused_shapes(shapes, fused)
        self._wholes = {name: _fused_name(name, fused) for name in shapes}
        self._rows: dict[str, slice] = {}
        self._shapes = shapes
        ends: dict[str, int] = {}
        for name, shape in shapes.items():
            whole = self._wholes[name]
            start = ends.get(whole, 0)
            ends[whole] = start + shape[0]
            if whole != name:
                self._rows[name] = slice(start, ends[whole])

    def names(self) -> Iterable[str]:
        """Return the names of the weights; of a tensor without a part among them, its own."""
        present = set(self._source.names())
        parts = [name for name in self._shapes if self._wholes[name] in present]
        return [*parts, *(name for name in present if name not in self._fused)]

    def _whole(self, name: str) -> str:
        return self._wholes.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._rows else self._source.shape(name)

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Raise `CheckpointError` unless the tensor that has this weight is there as wanted."""
        wanted = self._fused[self._whole(name)] if name in self._rows else shape
        self._source.check(source, self._whole(name), wanted, dtypes)

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        format_name, (num_rows, width) = self._source.format_and_shape(self._whole(name))
        rows = self._rows.get(name, slice(0, num_rows))
        return format_name, (rows.stop - rows.start, width)

    def grouped(self, name: str) -> GroupedTensor:
        whole = self._source.grouped(self._whole(name))
        rows = self._rows.get(name)
        if rows is None:
            return whole
        return replace(whole, shape=(rows.stop - rows.start, whole.shape[1]), rows=whole.rows[rows])

    def has_float8(self, name: str) -> bool:
        """Return whether `float8` has this weight: its rows have to be whole tiles."""
        rows = self._rows.get(name, slice(0, 0))
        is_tiled = rows.start % FLOAT8_TILE == 0 and rows.stop % FLOAT8_TILE == 0
        return is_tiled and self._source.has_float8(self._whole(name))

    def float8(self, name: str) -> Float8Tensor:
        whole = self._source.float8(self._whole(name))
        rows = self._rows.get(name)
        if rows is None:
            return whole
        tiles = slice(rows.start // FLOAT8_TILE, rows.stop // FLOAT8_TILE)
        return Float8Tensor(numbers=whole.numbers[rows], scales=whole.scales[tiles])
