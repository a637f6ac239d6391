"""Weights that are those of another source, but for names, rows or numbers that are changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.runner.weights.stored_tensor import Float8Tensor, GroupedTensor
from engine.runner.weights.tensor_source import TensorSource


class DerivedWeights(TensorSource):
    """All tensors of `source`, as they are there; a subclass changes what differs.

    One that only calls them otherwise overrides `names` and `stored_name`.
    """

    def __init__(self, source: TensorSource) -> None:
        """Take the source; it reads nothing."""
        self._source = source
        self.metadata = source.metadata

    def stored_name(self, name: str) -> str:
        """Return what `source` calls the tensor `name`."""
        return name

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self.stored_name(name))

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        self._source.check(source, self.stored_name(name), shape, dtypes)

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        return self._source.format_and_shape(self.stored_name(name))

    def grouped(self, name: str) -> GroupedTensor:
        return self._source.grouped(self.stored_name(name))

    def has_float8(self, name: str) -> bool:
        return self._source.has_float8(self.stored_name(name))

    def float8(self, name: str) -> Float8Tensor:
        return self._source.float8(self.stored_name(name))

    def identity(self) -> str:
        return self._source.identity()

    def stamps(self) -> list[list[int]]:
        return self._source.stamps()
