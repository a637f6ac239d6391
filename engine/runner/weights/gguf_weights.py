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
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile
from engine.runner.weights.stored_formats import dequantise
from engine.runner.weights.stored_tensor import GroupedTensor
from engine.runner.weights.tensor_source import TensorSource, stamps_of

WEIGHTS_FILE = "weights.gguf"
ROPE_FACTORS_TENSOR = "rope_freqs.weight"
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
}
_NAMES_OF_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""The norms of layers that have one after attention and one after the MLP too."""
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SAMPLE_BYTES = 256


def gguf_name(name: str, *, has_output_norms: bool = False) -> str:
    """Return the name in a GGUF file of a tensor with this Hugging Face name; it may have none."""
    for in_gguf, model_name in _MODEL_NAMES.items():
        if name == model_name:
            return in_gguf
    prefix, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    names = _LAYER_NAMES | (_NAMES_OF_FOUR_NORMS if has_output_norms else {})
    for in_gguf, layer_name in names.items():
        if part == layer_name:
            return f"blk.{prefix}.{in_gguf}.{kind}"
    return name


class GgufWeights(TensorSource):
    """The tensors of a GGUF file that a decoder of these `shapes` reads.

    The file's `llama` architecture pairs rows (2i, 2i + 1) of a query or key head for rotation,
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
        self._path = path
        four = any(name.endswith("post_feedforward_layernorm.weight") for name in shapes)
        self._names = {name: gguf_name(name, has_output_norms=four) for name in shapes}
        known = {*self._names.values(), ROPE_FACTORS_TENSOR}
        if unknown := sorted(gguf.tensors.keys() - known):
            raise CheckpointError(
                f"{path}: tensor {unknown[0]} is not part of the decoder that config.json describes"
            )
        self._tensors = gguf.tensors
        is_permuted = gguf.text("general.architecture") == "llama"
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads} if is_permuted else {}

    def names(self) -> Iterable[str]:
        return [name for name, in_gguf in self._names.items() if in_gguf in self._tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[self._names[name]].shape

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Raise `CheckpointError` unless the tensor is there, with this shape and a known type."""
        in_gguf = self._names.get(name, name)
        tensor = self._tensors.get(in_gguf)
        if tensor is None:
            raise CheckpointError(
                f"{self._path}: tensor {in_gguf} is missing: wanted shape {list(shape)}"
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self._path}: tensor {in_gguf} has shape {list(tensor.shape)}: "
                f"wanted {list(shape)}"
            )
        if dtypes is not None and tensor.type_name not in dtypes:
            raise CheckpointError(
                f"{self._path}: tensor {in_gguf} is {tensor.type_name}: wanted {', '.join(dtypes)}"
            )

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        stored = self._tensors[self._names[name]].grouped()
        return stored.format, stored.shape

    def stamps(self) -> list[list[int]]:
        return stamps_of([self._path])

    def grouped(self, name: str) -> GroupedTensor:
        stored = self._tensors[self._names[name]].grouped()
        order = self._row_order(name, stored.shape[0])
        if order is None:
            return stored
        return GroupedTensor(stored.format, stored.shape, stored.rows[order])

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

        What was made for such a file, a drafting layer for example, fits this one too.
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
        for name in self.names():
            digest.update(self._sample(name))
        return digest.hexdigest()

    def _sample(self, name: str) -> bytes:
        """Return the bytes of the float32 values before the middle of a tensor."""
        stored = self._tensors[self._names[name]].grouped()
        num_rows, width = stored.shape
        size_bytes = 4 * num_rows * width
        start = max(0, size_bytes // 2 - _SAMPLE_BYTES)
        stop = min(start + _SAMPLE_BYTES, size_bytes)
        first, last = start // (4 * width), -(-stop // (4 * width))
        order = self._row_order(name, num_rows)
        kept = np.arange(first, last) if order is None else order[first:last]
        rows = GroupedTensor(stored.format, (len(kept), width), stored.rows[kept])
        at = start - first * 4 * width
        return dequantise(rows).tobytes()[at : at + stop - start]


def half_split_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Return which row of interleaved heads is each row of heads with halves first."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
