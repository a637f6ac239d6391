"""One decoder layer's weights, packed for the CPU kernels.

A mixture-of-experts layer attaches here: `load_layer` fills `gate_up` and `down` with one MLP's
panels; with experts they become one pair per expert, and `kernels.layer` chooses by row.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from engine.runner.block_formats import quantise
from engine.runner.block_tensor import BlockTensor
from engine.runner.checkpoint import TensorFiles
from engine.runner.kernels.block_layout import BLOCK
from engine.runner.kernels.packed import PackedWeight, pack_into, packed_bytes, packed_view
from engine.runner.kernels.vector_ir import LANES
from engine.runner.model_spec import DecoderSpec
from engine.runner.rope import halves_first
from engine.runner.weight_memory import WeightMemory

NONE_1D = np.zeros(0, np.float32)
NONE_2D = np.zeros((0, 0), np.float32)
"""Stands for an absent bias, norm or residual."""
KERNEL_LOCK = threading.Lock()
"""Held around all parallel kernels.

numba's simplest thread pool ends the process when two threads enter it at once.
"""


@dataclass(frozen=True, slots=True)
class NumbaLayer:
    """One layer's packed weights; empty arrays for parts that the family does not have."""

    input_norm: np.ndarray
    qkv: PackedWeight
    qkv_bias: np.ndarray
    head_norms: np.ndarray
    output: PackedWeight
    output_bias: np.ndarray
    mlp_norm: np.ndarray
    gate_up: PackedWeight
    gate_up_bias: np.ndarray
    down: PackedWeight
    down_bias: np.ndarray


def load_layer(
    files: TensorFiles,
    prefix: str,
    spec: DecoderSpec,
    memory: WeightMemory,
    *,
    as_bytes: bool = False,
) -> NumbaLayer:
    """Load the layer whose tensors' names begin with `prefix`, with `KERNEL_LOCK` held.

    With `as_bytes` each weight of a product is rounded to a byte.
    """

    def packed(names: list[str], rotated: int = 0) -> PackedWeight:
        weights = [f"{name}.weight" for name in names]
        return pack(files, weights, memory, rotated, as_bytes=as_bytes)

    qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
    rotated = spec.head_dim if spec.is_rope_interleaved else 0
    head_norms = NONE_2D
    if spec.has_head_norms:
        norms = [files.read(f"{prefix}self_attn.{n}_norm.weight") for n in "qk"]
        head_norms = np.stack([halves_first(n, rotated) if rotated else n for n in norms])
    gate_up = [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]
    output, down = f"{prefix}self_attn.o_proj", f"{prefix}mlp.down_proj"
    gate_up_bias = NONE_1D
    if spec.has_mlp_bias:
        biases = [files.read(f"{name}.bias").reshape(-1, LANES) for name in gate_up]
        gate_up_bias = np.stack(biases, axis=1).reshape(-1)
    return NumbaLayer(
        input_norm=files.read(f"{prefix}input_layernorm.weight"),
        qkv=packed(qkv, rotated),
        qkv_bias=_biases(files, qkv, rotated) if spec.has_qkv_bias else NONE_1D,
        head_norms=head_norms,
        output=packed([output]),
        output_bias=_biases(files, [output]) if spec.has_output_bias else NONE_1D,
        mlp_norm=files.read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=packed(gate_up),
        gate_up_bias=gate_up_bias,
        down=packed([down]),
        down_bias=_biases(files, [down]) if spec.has_mlp_bias else NONE_1D,
    )


def pack(
    files: TensorFiles,
    names: list[str],
    memory: WeightMemory,
    rotated: int = 0,
    *,
    as_bytes: bool = False,
) -> PackedWeight:
    """Pack several weights with equal inputs into one.

    With `rotated`, a head size, the heads of the first two (query and key) are reordered, halves
    first.
    """
    tensors = []
    for i, name in enumerate(names):
        weight = files.read(name)
        if rotated and i < 2:
            weight = halves_first(weight, rotated)
        tensors.append(_as_bytes(weight) if as_bytes else _as_floats(weight))
    return _packed(tensors, memory)


def pack_as_bytes(weight: np.ndarray, memory: WeightMemory) -> PackedWeight:
    """Pack a weight `[outputs, inputs]` with each value rounded to a byte."""
    return _packed([_as_bytes(weight)], memory)


def _as_floats(weight: np.ndarray) -> BlockTensor:
    rows = np.ascontiguousarray(weight, np.float32)
    return BlockTensor("F32", (rows.shape[0], rows.shape[1]), rows.view(np.uint8))


def _as_bytes(weight: np.ndarray) -> BlockTensor:
    """Return a weight in blocks of bytes, if blocks divide its inputs."""
    return _as_floats(weight) if weight.shape[1] % BLOCK else quantise(weight, "Q8_0")


def _packed(tensors: list[BlockTensor], memory: WeightMemory) -> PackedWeight:
    described = [(tensor.format, tensor.shape) for tensor in tensors]
    data = memory.zeros((packed_bytes(described),), np.dtype(np.uint8))
    pack_into(tensors, data)
    return packed_view(described, data)


def _biases(files: TensorFiles, names: list[str], rotated: int = 0) -> np.ndarray:
    biases = [files.read(f"{name}.bias") for name in names]
    if rotated:
        biases[:2] = [halves_first(bias, rotated) for bias in biases[:2]]
    return np.concatenate(biases)
