"""How one quantised weight is stored in several tensors of a folder.

Of a linear layer `model.layers.0.mlp.up_proj` there are then, instead of `….weight`, tensors such
as `….qweight`, `….qzeros` and `….scales`. A scheme says which, in which types and shapes, and what
the values are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.tensor_files import TensorFiles

FLOATS = ("F32", "F16", "BF16")
_PART_VALUES = 1 << 18
"""Values that are computed at a time: temporary arrays stay small."""

Shape = tuple[int, ...]
Form = tuple[tuple[str, ...], Shape]
"""The types and the shape that a tensor may have."""


@dataclass(frozen=True, slots=True)
class PartOfWeight:
    """A tensor of a weight by the end of its name; it has one of `forms`."""

    suffix: str
    forms: tuple[Form, ...]
    is_optional: bool = False


class Tensors:
    """The tensors of one weight: those whose names begin with its layer's."""

    def __init__(self, files: TensorFiles, layer: str) -> None:
        self.layer = layer
        self._files = files

    def has(self, suffix: str) -> bool:
        return self._files.location(self._name(suffix)) is not None

    def form(self, suffix: str) -> tuple[str, Shape]:
        """Return the type and the shape of a tensor that is there."""
        found = self._files.location(self._name(suffix))
        assert found is not None
        return found.dtype, found.shape

    def read(self, suffix: str) -> np.ndarray:
        """Return a tensor as `TensorFiles.read` does, and as that raises."""
        return self._files.read(self._name(suffix))

    def check(self, source: Path, part: PartOfWeight) -> None:
        """Raise `CheckpointError` unless the tensor is there in one of its forms."""
        if part.is_optional and not self.has(part.suffix):
            return
        wanted = part.forms[0]
        if self.has(part.suffix):
            dtype, shape = self.form(part.suffix)
            for dtypes, may_be in part.forms:
                if dtype in dtypes and shape == may_be:
                    wanted = dtypes, may_be
        dtypes, may_be = wanted
        self._files.check(source, self._name(part.suffix), may_be, dtypes)

    def refuse(self, suffix: str, problem: str) -> CheckpointError:
        """Return the error that says what is wrong with a tensor that is there."""
        found = self._files.location(self._name(suffix))
        assert found is not None
        return CheckpointError(f"{found.path}: tensor {self._name(suffix)}: {problem}")

    def _name(self, suffix: str) -> str:
        return f"{self.layer}.{suffix}"


class Scheme(ABC):
    """A way to store weights `[outputs, inputs]`. Equal ones have equal texts (`repr`)."""

    stored: ClassVar[str]
    """The end of the name of the tensor that has the weight's numbers: it is always there."""
    stored_dtypes: ClassVar[tuple[str, ...]]
    suffixes: ClassVar[frozenset[str]]
    """The ends of the names of all tensors that a weight may have beside it."""

    @abstractmethod
    def shape(self, tensors: Tensors) -> tuple[int, int]:
        """Return (outputs, inputs), from the header of `stored` alone if that says it."""

    @abstractmethod
    def parts(self, tensors: Tensors, shape: tuple[int, int]) -> Sequence[PartOfWeight]:
        """Return the tensors of a weight of this shape.

        Raises `CheckpointError` for a shape that cannot be stored so.
        """

    def check_values(self, tensors: Tensors, shape: tuple[int, int]) -> None:
        """Raise `CheckpointError` for numbers without a meaning; reads few of them."""
        del tensors, shape

    @abstractmethod
    def format(self, tensors: Tensors) -> str:
        """Return the key of `stored_tensor.GROUP_SIZES` in which `rows` are; reads the scales."""

    @abstractmethod
    def rows(self, tensors: Tensors, format_name: str) -> np.ndarray:
        """Return the exact values as uint8 `[outputs, bytes of a row]` in that format."""


def in_parts(shape: tuple[int, int], rows: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Return the bytes of all outputs, which `rows` makes of those from one up to another.

    Each call but the last gets a multiple of eight.
    """
    num_outputs, num_inputs = shape
    step = max(8, _PART_VALUES // num_inputs // 8 * 8)
    whole: np.ndarray | None = None
    for first in range(0, num_outputs, step):
        last = min(first + step, num_outputs)
        made = np.ascontiguousarray(rows(first, last)).view(np.uint8)
        if whole is None:
            whole = np.empty((num_outputs, made.shape[1]), np.uint8)
        whole[first:last] = made
    assert whole is not None
    return whole
