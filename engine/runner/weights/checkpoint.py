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
from engine.runner.weights.fused_weights import FusedWeights, fused_shapes, has_fused_weights
from engine.runner.weights.gguf_weights import WEIGHTS_FILE, GgufWeights
from engine.runner.weights.schemes.quantization_config import read_quantization
from engine.runner.weights.schemes.scheme_weights import SchemeWeights
from engine.runner.weights.spec.config_values import read_json_object
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.stored_tensor import Float8Tensor, GroupedTensor
from engine.runner.weights.tensor_files import TensorFiles
from engine.runner.weights.tensor_source import TensorSource
from engine.runner.weights.text_weights import TextWeights, beginning_of_names

EXPERT_GATE = "mlp.gate"
"""The projection that scores a layer's experts; expert number n is `mlp.experts.n`."""
CHOICE_BIAS = "mlp.moe_statics.e_score_correction_bias"
SHARED_EXPERTS = "mlp.shared_experts"
_EXPERTS = ".mlp.experts."
_NORM = "norm.weight"


class Checkpoint(TensorSource):
    """The tensors of one folder, checked against what the decoder needs."""

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        """Read all headers.

        Raises `CheckpointError`, naming the file and the first tensor that is missing, wrong or not
        written yet.
        """
        shapes = expected_shapes(spec)
        is_fused = has_fused_weights(spec.architecture)
        stored = fused_shapes(shapes) if is_fused else shapes
        link = folder / WEIGHTS_FILE
        self._has_norm_offsets = spec.has_norm_offsets
        self.quantization = ""
        """What config.json says of how the weights are quantised, in words; empty: nothing."""
        self._source: TensorSource
        if link.is_symlink() or link.exists():
            # What is wrong is said of the file that people know, not of a link in the cache.
            self._source = GgufWeights(link.resolve(), stored, spec.num_heads, spec.num_kv_heads)
            self._has_norm_offsets = False  # the ones were added when the file was written
        elif (quantization := read_quantization(folder)) is not None:
            self.quantization = quantization.description
            self._source = SchemeWeights(TensorFiles(_shards(folder)), quantization)
        else:
            self._source = TensorFiles(_shards(folder))
        if beginning := beginning_of_names(self._source):
            self._source = TextWeights(self._source, beginning)
        if is_fused:
            self._source = FusedWeights(self._source, shapes)
        self.metadata = self._source.metadata
        if spec.experts is not None:
            self._refuse_other_experts(folder)
        for name, shape in shapes.items():
            self._source.check(folder, name, shape)
        self._check_norms(link.resolve() if link.exists() else folder, shapes)

    def _refuse_other_experts(self, folder: Path) -> None:
        """Raise `CheckpointError` for experts in one tensor, and for biases that are not zero.

        Some tools write a bias of zeros for each weight that they quantise.
        """
        for name in self.names():
            layer, found, rest = name.partition(_EXPERTS)
            if not found:
                continue
            if rest.startswith(("gate_up_proj", "down_proj")):
                raise CheckpointError(
                    f"{folder}: tensor {name} holds all experts of a layer: wanted a tensor for "
                    f"each, such as {layer}{_EXPERTS}0.down_proj.weight (transformers writes these "
                    "unless save_original_format is false)"
                )
            if rest.endswith(".bias") and self.read(name).any():
                raise CheckpointError(
                    f"{folder}: tensor {name} is a bias of an expert: wanted experts without biases"
                )

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
    names: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        names.setdefault(file_name, []).append(name)
    for file_name, of_file in names.items():
        if Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index_path}: {of_file[0]} is in {file_name!r}: wanted a file name"
            )
    shards = {folder / file_name: of_file for file_name, of_file in names.items()}
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
        shapes |= layer_shapes(spec, f"model.layers.{layer}.", spec.mixture_of(layer))
    shapes["model.norm.weight"] = (hidden,)
    if not spec.has_tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def layer_shapes(
    spec: DecoderSpec, prefix: str, mixture: ExpertMixture | None = None
) -> dict[str, tuple[int, ...]]:
    """Return all tensors of one layer: shapes by name, which begins with `prefix`.

    `mixture` is that of the layer, None for one with a single MLP.
    """
    hidden = spec.hidden_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv_bias, output_bias = spec.has_qkv_bias, spec.has_output_bias
    attention = {
        "self_attn.q_proj": (query, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, query, output_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for norm, linears in (("input", attention), ("post_attention", _mlp_linears(spec, mixture))):
        shapes[f"{prefix}{norm}_layernorm.weight"] = (hidden,)
        for name, (num_outputs, num_inputs, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (num_outputs, num_inputs)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (num_outputs,)
    if mixture is not None and mixture.has_choice_bias:
        shapes[f"{prefix}{CHOICE_BIAS}"] = (1, mixture.num_experts)
    if spec.has_output_norms:
        for norm in ("pre_feedforward", "post_feedforward"):
            shapes[f"{prefix}{norm}_layernorm.weight"] = (hidden,)
    if spec.has_head_norms:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes


def _mlp_linears(
    spec: DecoderSpec, mixture: ExpertMixture | None
) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and whether there is a bias, for each projection after attention."""
    hidden = spec.hidden_size

    def mlp(part: str, inner: int) -> dict[str, tuple[int, int, bool]]:
        return {
            f"{part}.gate_proj": (inner, hidden, spec.has_mlp_bias),
            f"{part}.up_proj": (inner, hidden, spec.has_mlp_bias),
            f"{part}.down_proj": (hidden, inner, spec.has_mlp_bias),
        }

    if mixture is None:
        return mlp("mlp", spec.intermediate_size)
    linears = {EXPERT_GATE: (mixture.num_experts, hidden, False)}
    for index in range(mixture.num_experts):
        linears |= mlp(f"mlp.experts.{index}", mixture.inner_size)
    if mixture.shared_size:
        linears |= mlp(SHARED_EXPERTS, mixture.shared_size)
    return linears
