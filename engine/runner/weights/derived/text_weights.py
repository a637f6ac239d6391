"""The text model's weights in files of a model with images, where names begin otherwise."""

from __future__ import annotations

from collections.abc import Iterable

from engine.runner.weights.derived.derived_weights import DerivedWeights
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

    def stored_name(self, name: str) -> str:
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
