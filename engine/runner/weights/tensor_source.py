"""What a decoder needs of the files that hold its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.stored_formats import dequantise
from engine.runner.weights.stored_tensor import Float8Tensor, GroupedTensor


class TensorSource(ABC):
    """Weights by their Hugging Face names."""

    metadata: dict[str, str]
    """What the files say about themselves."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""

    @abstractmethod
    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Raise `CheckpointError`, naming `source`, unless this tensor exists with this shape.

        `dtypes` are the stored types that are wanted (None: every one that can be read as floats).
        """

    @abstractmethod
    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        """Return the format and (outputs, inputs) that `grouped` has, reading no weight."""

    @abstractmethod
    def grouped(self, name: str) -> GroupedTensor:
        """Return a weight as stored; one of one dimension is a single row.

        Raises `CheckpointError` if the file is truncated.
        """

    def has_float8(self, name: str) -> bool:
        """Return whether `float8` has this weight too, reading none."""
        del name
        return False

    def float8(self, name: str) -> Float8Tensor:
        """Return a weight that is stored in fp8, in tiles with scales.

        Raises `CheckpointError` like `grouped`, and for numbers that are NaN.
        """
        raise NotImplementedError(name)

    @abstractmethod
    def identity(self) -> str:
        """Return a digest of these weights: names, shapes and some values of every tensor."""

    @abstractmethod
    def stamps(self) -> list[list[int]]:
        """Return size and modification time (ns) of each file: what tells that one has changed.

        Raises `CheckpointError` for a file that is gone.
        """

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as a new float32 array. Raises `CheckpointError` like `grouped`."""
        return dequantise(self.grouped(name)).reshape(self.shape(name))


def stamps_of(paths: Iterable[Path]) -> list[list[int]]:
    """Return the `TensorSource.stamps` of these files. Raises `CheckpointError` as it does."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        found.append([status.st_size, status.st_mtime_ns])
    return found
