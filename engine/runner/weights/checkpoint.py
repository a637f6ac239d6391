"""The weights of a model folder, in the types in which its files store them.

A folder has safetensors files (`tensor_files`), whose weights are quantised where config.json says
so (`schemes`), or a file `weights.gguf` (`gguf_weights`). Every header is checked before any
weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.gguf_weights import WEIGHTS_FILE, GgufWeights
from engine.runner.weights.model_spec import DecoderSpec, read_json_object
from engine.runner.weights.schemes.quantization_config import read_quantization
from engine.runner.weights.schemes.scheme_weights import SchemeWeights
from engine.runner.weights.stored_tensor import Float8Tensor, GroupedTensor
from engine.runner.weights.tensor_files import TensorFiles
from engine.runner.weights.tensor_source import TensorSource

_NORM = "norm.weight"


class Checkpoint(TensorSource):
    """The tensors of one folder, checked against what the decoder needs."""

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        """Read all headers.

        Raises `CheckpointError`, naming the file and the first tensor that is missing, wrong or not
        written yet.
        """
        shapes = expected_shapes(spec)
        link = folder / WEIGHTS_FILE
        self._has_norm_offsets = spec.has_norm_offsets
        self.quantization = ""
        """What config.json says of how the weights are quantised, in words; empty: nothing."""
        self._source: TensorSource
        if link.is_symlink() or link.exists():
            # What is wrong is said of the file that people know, not of a link in the cache.
            self._source = GgufWeights(link.resolve(), shapes, spec.num_heads, spec.num_kv_heads)
            self._has_norm_offsets = False  # converters add the ones
        elif (quantization := read_quantization(folder)) is not None:
            self.quantization = quantization.description
            self._source = SchemeWeights(TensorFiles(_shards(folder)), quantization)
        else:
            self._source = TensorFiles(_shards(folder))
        self.metadata = self._source.metadata
        for name, shape in shapes.items():
            self._source.check(folder, name, shape)
        self._check_norms(link.resolve() if link.exists() else folder, shapes)

    def _check_norms(self, where: Path, names: Iterable[str]) -> None:
        """Raise `CheckpointError` for a norm that holds zeros alone.

        A copy that reserves its space first has the size of the whole file, and zeros where it has
        not come yet. Norms are short, lie in every part of a file, and are never zero.
        """
        for name in names:
            if name.endswith(_NORM) and not self._source.read(name).any():
                raise CheckpointError(
                    f"{where}: tensor {name} holds zeros alone: its file is still being copied, or "
                    "was not copied wholly"
                )

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
        stored, shape = self._source.format_and_shape(name)
        return ("F32" if self._is_offset(name) else stored), shape

    def grouped(self, name: str) -> GroupedTensor:
        if self._is_offset(name):
            values = self.read(name)[None]
            return GroupedTensor("F32", values.shape, values.view(np.uint8))
        return self._source.grouped(name)

    def has_float8(self, name: str) -> bool:
        return self._source.has_float8(name)

    def float8(self, name: str) -> Float8Tensor:
        return self._source.float8(name)

    def stamps(self) -> list[list[int]]:
        return self._source.stamps()

    def read(self, name: str) -> np.ndarray:
        values = self._source.read(name)
        return values + np.float32(1.0) if self._is_offset(name) else values

    def _is_offset(self, name: str) -> bool:
        """Return whether the file has this norm's weights less one."""
        return self._has_norm_offsets and name.endswith(_NORM)


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
    if spec.has_output_norms:
        for norm in ("pre_feedforward", "post_feedforward"):
            shapes[f"{prefix}{norm}_layernorm.weight"] = (hidden,)
    if spec.has_head_norms:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes
