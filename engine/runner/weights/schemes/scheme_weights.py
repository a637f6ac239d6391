"""The weights of a folder whose config.json says that they are quantised (`quantization_config`).

What is stored in a scheme has its exact values here, in groups where a grouped format has them
(`integer_formats`), else in float32; the rest is as it is stored. A tensor is read when it is asked
for, with its scales, and nothing of it is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.schemes.float8_scheme import Float8
from engine.runner.weights.schemes.quantization_config import Quantization
from engine.runner.weights.schemes.scheme import FLOATS, Scheme, Tensors
from engine.runner.weights.stored_tensor import FLOAT8_TILE, Float8Tensor, GroupedTensor
from engine.runner.weights.tensor_files import TensorFiles
from engine.runner.weights.tensor_source import TensorSource

_WEIGHT = ".weight"


class SchemeWeights(TensorSource):
    """The tensors of `files`, in which `….weight` stands for what a scheme stores of it."""

    def __init__(self, files: TensorFiles, quantization: Quantization) -> None:
        """Find the weights that are stored in a scheme.

        Raises `CheckpointError` for one that config.json says is not.
        """
        self.metadata = files.metadata
        self._files, self._quantization = files, quantization
        self._schemes: dict[str, Scheme] = {}
        self._formats: dict[str, str] = {}
        for name in files.names():
            self._find(name)
        stored = {
            f"{name.removesuffix(_WEIGHT)}.{suffix}"
            for name, scheme in self._schemes.items()
            for suffix in (*scheme.suffixes, scheme.stored)
        }
        plain = [name for name in files.names() if name not in stored]
        self._names = [*plain, *self._schemes]

    def _find(self, name: str) -> None:
        layer, _, suffix = name.rpartition(".")
        location = self._files.location(name)
        assert location is not None
        scheme = self._quantization.scheme_of(layer)
        possible = [
            one for one in self._quantization.schemes
            if suffix == one.stored and location.dtype in one.stored_dtypes
        ]  # fmt: skip
        if not possible:
            return
        if scheme not in possible:
            says = "has no group for it" if scheme is None else "has another form for it"
            stored, types = ("weight", FLOATS) if scheme is None else (
                scheme.stored, scheme.stored_dtypes
            )  # fmt: skip
            raise CheckpointError(
                f"{location.path}: tensor {name} is {location.dtype}, and quantization_config "
                f"{says}: wanted {layer}.{stored} in {' or '.join(types)}"
            )
        weight = f"{layer}{_WEIGHT}"
        if name != weight and self._files.location(weight) is not None:
            raise CheckpointError(f"{location.path}: {weight} is there beside {name}: wanted one")
        self._schemes[weight] = scheme

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        scheme = self._schemes.get(name)
        return self._files.shape(name) if scheme is None else scheme.shape(self._tensors(name))

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Raise `CheckpointError` unless the tensor, or all that stands for it, is there."""
        scheme, tensors = self._schemes.get(name), self._tensors(name)
        if scheme is None and len(shape) == 2 and name.endswith(_WEIGHT):
            scheme = self._quantization.required_scheme(tensors.layer)
        if scheme is None and self._files.location(name) is None and len(shape) == 2:
            # A weight of which nothing is there: either form of it will do.
            self._refuse_missing(source, tensors, shape)
        if scheme is None:
            self._files.check(source, name, shape, dtypes)
            return
        if len(shape) != 2 or dtypes is not None:
            raise tensors.refuse(scheme.stored, f"is quantised: wanted {list(shape)} of floats")
        if not tensors.has(scheme.stored):
            self._refuse_missing(source, tensors, shape, scheme)
        of_matrix = (shape[0], shape[1])
        for part in scheme.parts(tensors, of_matrix):
            tensors.check(source, part)
        scheme.check_values(tensors, of_matrix)

    def _refuse_missing(
        self, source: Path, tensors: Tensors, shape: tuple[int, ...], scheme: Scheme | None = None
    ) -> None:
        suffixes = [one.stored for one in ([scheme] if scheme else self._quantization.schemes)]
        if scheme is None and "weight" not in suffixes:
            suffixes.append("weight")
        names = " or ".join(f"{tensors.layer}.{suffix}" for suffix in suffixes)
        raise CheckpointError(
            f"{source}: tensor {names} is missing: wanted a weight of shape {list(shape)}"
        )

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        """Return the format that has the values exactly, for which scales are read once."""
        scheme = self._schemes.get(name)
        if scheme is None:
            return self._files.format_and_shape(name)
        tensors = self._tensors(name)
        if name not in self._formats:
            self._formats[name] = scheme.format(tensors)
        return self._formats[name], scheme.shape(tensors)

    def grouped(self, name: str) -> GroupedTensor:
        scheme = self._schemes.get(name)
        if scheme is None:
            return self._files.grouped(name)
        format_name, shape = self.format_and_shape(name)
        return GroupedTensor(format_name, shape, scheme.rows(self._tensors(name), format_name))

    def has_float8(self, name: str) -> bool:
        scheme = self._schemes.get(name)
        return isinstance(scheme, Float8) and scheme.tile == (FLOAT8_TILE, FLOAT8_TILE)

    def float8(self, name: str) -> Float8Tensor:
        scheme = self._schemes[name]
        assert isinstance(scheme, Float8)
        return scheme.stored_tiles(self._tensors(name))

    def read(self, name: str) -> np.ndarray:
        return super().read(name) if name in self._schemes else self._files.read(name)

    def identity(self) -> str:
        """Return a digest of the files' identity and of what is read from them."""
        read = [(name, repr(scheme)) for name, scheme in self._schemes.items()]
        described = f"{self._files.identity()} {json.dumps(read)}"
        return hashlib.sha256(described.encode()).hexdigest()

    def stamps(self) -> list[list[int]]:
        return self._files.stamps()

    def _tensors(self, name: str) -> Tensors:
        return Tensors(self._files, name.removesuffix(_WEIGHT))
