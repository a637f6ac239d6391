"""The weights of a GGUF file under their Hugging Face names, as they are stored.

A Hugging Face folder whose weights are the file or link `weights.gguf` is served from it. The file
is mapped: nothing is read before it is used, and its pages belong to the machine, not to this
process.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile
from engine.runner.weights.spec.decoder_tensors import SINKS
from engine.runner.weights.stored_formats import dequantise
from engine.runner.weights.stored_tensor import GroupedTensor, row_bytes
from engine.runner.weights.tensor_source import TensorSource, stamps_of

WEIGHTS_FILE = "weights.gguf"
ROPE_FACTORS_TENSOR = "rope_freqs.weight"
LONG_ROPE_TENSORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Scaled rotary positions, which config.json states."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_FUSED_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
"""The same of files with fused weights (`fused_weights`)."""
_EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
"""Tensors of three dimensions, with a matrix for each expert; biases have two, with a row."""
_EXPERTS = "mlp.experts"
_CHOICE_BIASES = (
    "mlp.moe_statics.e_score_correction_bias",
    "mlp.gate.e_score_correction_bias",
)
_CHOICE_BIAS = "exp_probs_b.bias"
"""`[1, experts]` or `[experts]` with Hugging Face, and either in a GGUF file."""
_NAMES_OF_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""The norms of layers that have one after attention and one after the MLP too."""
_NAMES_OF_GLM_4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_POST_ATTENTION_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""The norm before the MLP, which other architectures call `ffn_norm`."""
_DRAFTING = "nextn.eh_proj.weight"
"""A tensor of each layer that drafts tokens; such layers are the last ones, and are not read."""
_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma3": _NAMES_OF_FOUR_NORMS,
    "glm4": _NAMES_OF_GLM_4,
    "glm4moe": _POST_ATTENTION_NORM,
    "gpt-oss": _POST_ATTENTION_NORM,
}
"""What counts before `_LAYER_NAMES`, by architecture."""
_PAIRS_OF_NEIGHBOURS = ("llama", "granite", "mistral3")
_SINKS = "attn_sinks.weight"
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """The name of a GGUF file's tensor; with `expert` its part of that number is meant."""

    name: str
    expert: int | None = None


def num_drafting_layers(gguf: GgufFile) -> int:
    """Return how many of a file's layers draft tokens."""
    return len(_drafting_layers(gguf))


def _drafting_layers(gguf: GgufFile) -> set[str]:
    """Return what the names of all tensors of drafting layers begin with."""
    return {name.removesuffix(_DRAFTING) for name in gguf.tensors if name.endswith(_DRAFTING)}


def gguf_place(name: str, architecture: str = "") -> GgufPlace:
    """Return where a GGUF file has the tensor of this Hugging Face name; it may have none."""
    for in_gguf, model_name in _MODEL_NAMES.items():
        if name == model_name:
            return GgufPlace(in_gguf)
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if rest in _CHOICE_BIASES:
        return GgufPlace(f"blk.{layer}.{_CHOICE_BIAS}")
    if rest == SINKS:
        return GgufPlace(f"blk.{layer}.{_SINKS}")
    part, _, kind = rest.rpartition(".")
    others = _OTHER_NAMES.get(architecture, {})
    names = (*others.items(), *_LAYER_NAMES.items(), *_FUSED_NAMES.items())
    for in_gguf, layer_name in names:
        if part == layer_name:
            return GgufPlace(f"blk.{layer}.{in_gguf}.{kind}")
    experts, _, projection = part.rpartition(".")
    experts, _, number = experts.rpartition(".")
    if experts == _EXPERTS and projection in _EXPERT_NAMES:
        return GgufPlace(f"blk.{layer}.{_EXPERT_NAMES[projection]}.{kind}", int(number))
    return GgufPlace(name)


class GgufWeights(TensorSource):
    """The tensors of a GGUF file that a decoder of these `shapes` reads.

    Files of Llama and of its kin pair rows (2i, 2i + 1) of a query or key head for rotation,
    Hugging Face (i, i + half): such rows are returned in Hugging Face's order.
    """

    def __init__(
        self, path: Path, shapes: dict[str, tuple[int, ...]], num_heads: int, num_kv_heads: int
    ) -> None:
        """Read the file's header; `shapes` are by Hugging Face name.

        Raises `CheckpointError` when the file is broken, or has a tensor that is not of `shapes`:
        without a bias the decoder would compute another model.
        """
        self.metadata: dict[str, str] = {}
        gguf = GgufFile(path)
        self._path, self._shapes = path, shapes
        architecture = gguf.text("general.architecture")
        self._places = {name: gguf_place(name, architecture) for name in shapes}
        self._num_matrices = Counter(place.name for place in self._places.values())
        known = {*self._num_matrices, ROPE_FACTORS_TENSOR, *LONG_ROPE_TENSORS}
        drafting = tuple(_drafting_layers(gguf))
        unread = {name for name in gguf.tensors if name.startswith(drafting)}
        if unknown := sorted(gguf.tensors.keys() - known - unread):
            raise CheckpointError(
                f"{path}: tensor {unknown[0]} is not part of the decoder that config.json describes"
            )
        self._tensors = gguf.tensors
        is_permuted = architecture in _PAIRS_OF_NEIGHBOURS
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads} if is_permuted else {}

    def names(self) -> Iterable[str]:
        return [name for name, place in self._places.items() if place.name in self._tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        shape = self._tensors[place.name].shape
        if place.name.endswith(_CHOICE_BIAS):
            return self._shapes[name]
        return shape if place.expert is None else shape[1:]

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Raise `CheckpointError` unless the tensor is there, with this shape and a known type.

        Of an expert, the tensor of all experts is checked.
        """
        place = self._places.get(name, GgufPlace(name))
        whole = shape if place.expert is None else (self._num_matrices[place.name], *shape)
        tensor = self._tensors.get(place.name)
        if tensor is None:
            raise CheckpointError(
                f"{self._path}: tensor {place.name} is missing: wanted shape {list(whole)}"
            )
        has_shape = tensor.shape == whole
        if place.name.endswith(_CHOICE_BIAS):
            has_shape = tensor.shape in (whole[-1:], (1, whole[-1]))
        if not has_shape:
            raise CheckpointError(
                f"{self._path}: tensor {place.name} has shape {list(tensor.shape)}: "
                f"wanted {list(whole)}"
            )
        if dtypes is not None and tensor.type_name not in dtypes:
            raise CheckpointError(
                f"{self._path}: tensor {place.name} is {tensor.type_name}: "
                f"wanted {', '.join(dtypes)}"
            )

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        stored = self._stored(name)
        return stored.format, stored.shape

    def stamps(self) -> list[list[int]]:
        return stamps_of([self._path])

    def grouped(self, name: str) -> GroupedTensor:
        stored = self._stored(name)
        order = self._row_order(name, stored.shape[0])
        if order is None:
            return stored
        return GroupedTensor(stored.format, stored.shape, stored.rows[order])

    def _stored(self, name: str) -> GroupedTensor:
        """Return the rows of a tensor in the file's order; they are a part of the mapped file."""
        place = self._places[name]
        tensor = self._tensors[place.name]
        whole = tensor.grouped()
        if place.expert is None:
            return whole
        *_, num_rows, width = (1, *tensor.shape[1:])
        first = place.expert * num_rows
        return GroupedTensor(whole.format, (num_rows, width), whole.rows[first : first + num_rows])

    def _row_order(self, name: str, num_rows: int) -> np.ndarray | None:
        """Return which stored row each row is, None where they are in order."""
        parts = name.split(".")
        num_heads = self._heads.get(parts[-2]) if len(parts) > 1 else None
        if num_heads is None:
            return None
        if parts[-1] != "weight":
            raise CheckpointError(
                f"{self._path}: {name} is a bias of heads with neighbouring rotary pairs: wanted "
                "none, as no model of this architecture has one"
            )
        return half_split_order(num_rows, num_heads)

    def identity(self) -> str:
        """Return the identity of a safetensors file with the same values in float32.

        What was made for such a file, a drafting layer for example, fits this one too. Raises
        `CheckpointError` for a file that is gone or was cut off.
        """
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self.names():
            start, end = end, end + 4 * math.prod(self.shape(name))
            header[name] = {
                "dtype": "F32", "shape": self.shape(name), "data_offsets": [start, end],
            }  # fmt: skip
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        digest = hashlib.sha256(encoded)
        digest.update(struct.pack("<Q", 8 + len(encoded) + end))
        try:
            with self._path.open("rb", buffering=0) as file:
                for name in self.names():
                    digest.update(self._sample(file, name))
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error.strerror}") from None
        return digest.hexdigest()

    def _sample(self, file: RawIOBase, name: str) -> bytes:
        """Return the bytes of the float32 values before the middle of a tensor.

        They are read from `file`: a mixture has a sample in each of tens of thousands of places,
        and in a mapped file each would take a page fault and what is read ahead there.
        """
        place = self._places[name]
        tensor = self._tensors[place.name]
        num_rows, width = self._stored(name).shape
        size_bytes = 4 * num_rows * width
        start = max(0, size_bytes // 2 - _SAMPLE_BYTES)
        stop = min(start + _SAMPLE_BYTES, size_bytes)
        first, last = start // (4 * width), -(-stop // (4 * width))
        order = self._row_order(name, num_rows)
        kept = np.arange(first, last) if order is None else order[first:last]
        stride = row_bytes(tensor.type_name, width)
        rows = np.empty((len(kept), stride), np.uint8)
        for row, index in zip(rows, kept + (place.expert or 0) * num_rows, strict=True):
            file.seek(tensor.offset + int(index) * stride)
            if file.readinto(row.data) != stride:
                raise CheckpointError(f"{self._path}: truncated within tensor {tensor.name}")
        values = dequantise(GroupedTensor(tensor.type_name, (len(kept), width), rows))
        at = start - first * 4 * width
        return values.tobytes()[at : at + stop - start]


def half_split_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Return which row of interleaved heads is each row of heads with halves first."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
