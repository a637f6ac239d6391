"""The text model's weights in files of a model with images, where names begin otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.stored_tensor import Float8Tensor, GroupedTensor
from engine.runner.weights.tensor_source import TensorSource

_MODEL = "model."
_HEAD = "lm_head.weight"
_BEGINNINGS = {
    "language_model.model.": f"language_model.{_HEAD}",
    "model.language_model.": _HEAD,
}
"""What stands for `model.` in older and in newer files, and what the head is called there."""


def beginning_of_names(source: TensorSource) -> str:
    """Return what stands for `model.` in the names of these files; empty: nothing else does."""
    present = set(source.names())
    return next((one for one in _BEGINNINGS if f"{one}embed_tokens.weight" in present), "")


class TextWeights(DerivedWeights):
    """The text model's tensors in `source`, in whose names `beginning` stands for `model.`."""

    def __init__(self, source: TensorSource, beginning: str) -> None:
        """Take a `beginning` of `beginning_of_names`; it reads nothing."""
        super().__init__(source)
        self._beginning = beginning

    def _stored(self, name: str) -> str:
        """Return the name in the files of the tensor `name`."""
        if name.startswith(_MODEL):
            return self._beginning + name.removeprefix(_MODEL)
        return _BEGINNINGS[self._beginning] if name == _HEAD else name

    def names(self) -> Iterable[str]:
        """Return the names of the text model's tensors, as they are in a model of texts alone."""
        found = []
        for name in self._source.names():
            if name.startswith(self._beginning):
                found.append(_MODEL + name.removeprefix(self._beginning))
            elif name == _BEGINNINGS[self._beginning]:
                found.append(_HEAD)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored(name))

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        self._source.check(source, self._stored(name), shape, dtypes)

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        return self._source.format_and_shape(self._stored(name))

    def grouped(self, name: str) -> GroupedTensor:
        return self._source.grouped(self._stored(name))

    def has_float8(self, name: str) -> bool:
        return self._source.has_float8(self._stored(name))

    def float8(self, name: str) -> Float8Tensor:
        return self._source.float8(self._stored(name))
