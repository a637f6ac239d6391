"""The weights of a model folder, in the types in which its files store them.

Every header is checked before any weight is read. A safetensors file is eight bytes of header
length (little endian), a JSON header that gives each tensor's dtype, shape and byte range, then the
data. Its tensors are read one at a time, so loading never holds a second copy of the model.

A folder with a file `weights.gguf` has its weights there (`gguf_weights`).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.gguf_weights import WEIGHTS_FILE, GgufWeights
from engine.runner.weights.model_spec import DecoderSpec, read_json_object
from engine.runner.weights.stored_tensor import BlockTensor
from engine.runner.weights.tensor_source import TensorSource, stamps_of

_FLOAT_DTYPES = ("F32", "F16", "BF16")
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4}
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
        return tensor.dtype, (math.prod(tensor.shape[:-1]), tensor.shape[-1])

    def blocks(self, name: str) -> BlockTensor:
        dtype, shape = self.format_and_shape(name)
        return BlockTensor(
            dtype, shape, self._stored(self._tensors[name], name).reshape(shape[0], -1)
        )

    def stamps(self) -> list[list[int]]:
        return stamps_of(self._paths)

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as a new array: float32, or int32 if it holds integers."""
        tensor = self._tensors[name]
        if tensor.dtype == "I32":
            return self._stored(tensor, name).view(np.int32).reshape(tensor.shape)
        return super().read(name)

    def _stored(self, tensor: StoredTensor, name: str) -> np.ndarray:
        data = np.fromfile(tensor.path, np.uint8, tensor.size_bytes, offset=tensor.offset)
        if data.size != tensor.size_bytes:
            raise CheckpointError(f"{tensor.path}: truncated within tensor {name}")
        return data


class Checkpoint(TensorSource):
    """The tensors of one folder, checked against what the decoder needs."""

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        """Read all headers.

        Raises `CheckpointError`, naming the file and the first tensor that is missing or wrong.
        """
        shapes = expected_shapes(spec)
        link = folder / WEIGHTS_FILE
        self._source: TensorSource
        if link.is_symlink() or link.exists():
            # What is wrong is said of the file that people know, not of a link in the cache.
            self._source = GgufWeights(link.resolve(), shapes, spec.num_heads, spec.num_kv_heads)
        else:
            self._source = TensorFiles(_shards(folder))
        self.metadata = self._source.metadata
        for name, shape in shapes.items():
            self._source.check(folder, name, shape)

    def identity(self) -> str:
        return self._source.identity()

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        self._source.check(source, name, shape, dtypes)

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        return self._source.format_and_shape(name)

    def blocks(self, name: str) -> BlockTensor:
        return self._source.blocks(name)

    def stamps(self) -> list[list[int]]:
        return self._source.stamps()

    def read(self, name: str) -> np.ndarray:
        return self._source.read(name)


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


def _shards(folder: Path) -> dict[Path, list[str]]:
    """Return the files to read, with the tensors the index expects in each (empty: all)."""
    single, index_path = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return {single: []}
    if not index_path.exists():
        raise CheckpointError(
            f"{folder}: no weights: wanted model.safetensors or model.safetensors.index.json"
        )
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map is not an object of file names")
    shards: dict[Path, list[str]] = {}
    for name, file_name in weight_map.items():
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{index_path}: {name} is in {file_name!r}: wanted a file name")
        shards.setdefault(folder / file_name, []).append(name)
    for path in shards:
        if not path.exists():
            raise CheckpointError(f"{path}: shard is missing: {index_path.name} lists it")
    return shards


def file_with_weights(folder: Path) -> Path | None:
    """Return the file in which a folder's weights are looked for first; None without weights."""
    names = (WEIGHTS_FILE, "model.safetensors", "model.safetensors.index.json")
    return next((folder / name for name in names if (folder / name).exists()), None)


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return all tensors that the decoder reads: shapes by Hugging Face names."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        shapes |= layer_shapes(spec, f"model.layers.{layer}.")
    shapes["model.norm.weight"] = (hidden,)
    if not spec.has_tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def layer_shapes(spec: DecoderSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return all tensors of one layer: shapes by name, which begins with `prefix`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv_bias, output_bias, mlp_bias = spec.has_qkv_bias, spec.has_output_bias, spec.has_mlp_bias
    attention = {
        "self_attn.q_proj": (query, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, query, output_bias),
    }
    mlp = {
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for norm, linears in (("input", attention), ("post_attention", mlp)):
        shapes[f"{prefix}{norm}_layernorm.weight"] = (hidden,)
        for name, (num_outputs, num_inputs, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (num_outputs, num_inputs)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (num_outputs,)
    if spec.has_head_norms:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes
