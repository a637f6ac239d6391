"""The tensors of safetensors files, in the types in which they are stored.

Every header is checked before any tensor is read. A file is eight bytes of header length (little
endian), a JSON header that gives each tensor's dtype, shape and byte range, then the data. Tensors
are read one at a time, so loading never holds a second copy of the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.stored_tensor import GroupedTensor
from engine.runner.weights.tensor_source import TensorSource, stamps_of

_FLOAT_DTYPES = ("F32", "F16", "BF16")
_DTYPE_BYTES = {
    "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8, "U8": 1,
}  # fmt: skip
_INTEGERS = {"I8": "<i1", "I32": "<i4", "I64": "<i8"}
"""Types that are read as they are, by numpy's names."""
_MAX_HEADER_BYTES = 100 << 20
_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one tensor: `offset` is in bytes from the start of its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class TensorFiles(TensorSource):
    """The tensors of some safetensors files, and a digest of the files."""

    def __init__(self, shards: Mapping[Path, Sequence[str]]) -> None:
        """Read the headers of `shards`: files, and the tensors to take from each (empty: all).

        Raises `CheckpointError` for a file that is missing, truncated or not safetensors.
        """
        self._digest = hashlib.sha256()
        self._tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        self._paths = list(shards)
        for path, wanted in shards.items():
            found = self._read_header(path)
            for name in wanted or found:
                if name not in found:
                    raise CheckpointError(
                        f"{path}: has no tensor {name}, which the index puts here"
                    )
                self._tensors[name] = found[name]

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Raise `CheckpointError` unless the tensor is there, with this shape and a known type."""
        dtypes = dtypes or _FLOAT_DTYPES
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{source}: tensor {name} is missing: wanted shape {list(shape)}")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}: "
                f"config.json wants {list(shape)}"
            )
        if tensor.dtype not in dtypes:
            wanted = " or ".join(filter(None, [", ".join(dtypes[:-1]), dtypes[-1]]))
            raise CheckpointError(
                f"{tensor.path}: tensor {name} is {tensor.dtype}: wanted {wanted}"
            )
        wanted_bytes = math.prod(shape) * _DTYPE_BYTES[tensor.dtype]
        if tensor.size_bytes != wanted_bytes:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has {tensor.size_bytes} bytes: "
                f"{tensor.dtype} {list(shape)} wants {wanted_bytes}"
            )

    def _read_header(self, path: Path) -> dict[str, StoredTensor]:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
                if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                    raise CheckpointError(
                        f"{path}: {size} bytes with a header of {length}: truncated, or not "
                        "safetensors"
                    )
                header = file.read(length)
                tensors, metadata = _parse_header(path, header, 8 + length, size)
                self.metadata |= metadata
                self._digest.update(header)
                self._digest.update(struct.pack("<Q", size))
                for tensor in tensors.values():
                    file.seek(tensor.offset + max(0, tensor.size_bytes // 2 - _SAMPLE_BYTES))
                    self._digest.update(file.read(min(_SAMPLE_BYTES, tensor.size_bytes)))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        return tensors

    def identity(self) -> str:
        return self._digest.hexdigest()

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        tensor = self._tensors[name]
        width = tensor.shape[-1] if tensor.shape else 1
        return tensor.dtype, (math.prod(tensor.shape[:-1]), width)

    def grouped(self, name: str) -> GroupedTensor:
        dtype, shape = self.format_and_shape(name)
        return GroupedTensor(
            dtype, shape, self._stored(self._tensors[name], name).reshape(shape[0], -1)
        )

    def stamps(self) -> list[list[int]]:
        return stamps_of(self._paths)

    def location(self, name: str) -> StoredTensor | None:
        """Return where a tensor is, and its type and shape; None if there is none."""
        return self._tensors.get(name)

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as a new array: integers as they are, F8_E4M3 in bytes, else float32.

        Raises `CheckpointError` if the file is truncated.
        """
        tensor = self._tensors[name]
        if tensor.dtype == "F8_E4M3":
            return self._stored(tensor, name).reshape(tensor.shape)
        if tensor.dtype in _INTEGERS:
            integers = np.dtype(_INTEGERS[tensor.dtype])
            return self._stored(tensor, name).view(integers).reshape(tensor.shape)
        return super().read(name)

    def entry(self, name: str, index: int) -> np.ndarray:
        """Return the bytes of what a tensor has at an index of its first dimension.

        Raises `CheckpointError` if the file is truncated.
        """
        whole = self._tensors[name]
        size_bytes = whole.size_bytes // whole.shape[0]
        offset = whole.offset + index * size_bytes
        return self._stored(replace(whole, offset=offset, size_bytes=size_bytes), name)

    def _stored(self, tensor: StoredTensor, name: str) -> np.ndarray:
        data = np.fromfile(tensor.path, np.uint8, tensor.size_bytes, offset=tensor.offset)
        if data.size != tensor.size_bytes:
            raise CheckpointError(f"{tensor.path}: truncated within tensor {name}")
        return data


def _parse_header(
    path: Path, header: bytes, data_start: int, file_bytes: int
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    try:
        entries: dict[str, Any] = json.loads(header)
        metadata = {str(k): str(v) for k, v in (entries.pop("__metadata__", None) or {}).items()}
        tensors = {
            name: StoredTensor(
                path,
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                data_start + int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
        }
    except (
        *(ValueError, TypeError, KeyError, IndexError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise CheckpointError(f"{path}: the safetensors header is broken: {error!r}") from error
    for name, tensor in tensors.items():
        end = tensor.offset + tensor.size_bytes
        if tensor.size_bytes < 0 or tensor.offset < data_start or end > file_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {name} ends at byte {end}, the file at {file_bytes}"
            )
    return tensors, metadata
