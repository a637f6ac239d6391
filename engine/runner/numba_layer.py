"""One decoder layer's weights, packed for the CPU kernels.

A quantised weight format attaches here: `pack` returns panels of floats or of bytes with scales
(`kernels.panel_product`), and every kernel takes either. A further format adds a packing function
like `pack_as_bytes` and a kind of panel in `kernels.panel_product`.

A mixture-of-experts layer attaches here: `load_layer` fills `gate_up` and `down` with one MLP's
panels; with experts they become one pair per expert, and `kernels.layer` chooses by row.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from engine.runner.kernels.matmul import pack_rows, pack_rows_as_bytes
from engine.runner.kernels.panel_product import SCALE_ROWS
from engine.runner.kernels.vector_ir import LANES
from engine.runner.model_spec import DecoderSpec
from engine.runner.rope import halves_first
from engine.runner.tensor_source import TensorSource
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
    qkv: np.ndarray
    qkv_bias: np.ndarray
    head_norms: np.ndarray
    output: np.ndarray
    output_bias: np.ndarray
    mlp_norm: np.ndarray
    gate_up: np.ndarray
    gate_up_bias: np.ndarray
    down: np.ndarray
    down_bias: np.ndarray


def load_layer(
    files: TensorSource,
    prefix: str,
    spec: DecoderSpec,
    memory: WeightMemory,
    *,
    as_bytes: bool = False,
) -> NumbaLayer:
    """Load the layer whose tensors' names begin with `prefix`, with `KERNEL_LOCK` held.

    With `as_bytes` each weight of a product is rounded to a byte.
    """

    def packed(names: list[str], rotated: int = 0, *, is_alternating: bool = False) -> np.ndarray:
        weights = [f"{name}.weight" for name in names]
        return pack(
            files, weights, memory, rotated, is_alternating=is_alternating, as_bytes=as_bytes
        )

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
        gate_up=packed(gate_up, is_alternating=True),
        gate_up_bias=gate_up_bias,
        down=packed([down]),
        down_bias=_biases(files, [down]) if spec.has_mlp_bias else NONE_1D,
    )


def pack(
    files: TensorSource,
    names: list[str],
    memory: WeightMemory,
    rotated: int = 0,
    *,
    is_alternating: bool = False,
    as_bytes: bool = False,
) -> np.ndarray:
    """Pack several weights with equal inputs into one, consecutively or alternating.

    With `rotated`, a head size, the heads of the first two (query and key) are reordered, halves
    first.
    """
    sizes = [files.shape(name)[0] for name in names]
    panels = _empty_panels(memory, sum(sizes), files.shape(names[0])[1], as_bytes)
    pack_some = pack_rows_as_bytes if as_bytes else pack_rows
    first = 0
    for i, name in enumerate(names):
        weight = files.read(name)
        if rotated and i < 2:
            weight = halves_first(weight, rotated)
        pack_some(
            weight, panels, i if is_alternating else first, len(names) if is_alternating else 1
        )
        first += sizes[i] // LANES
    return panels


def pack_as_bytes(weight: np.ndarray, memory: WeightMemory) -> np.ndarray:
    """Pack a weight `[outputs, inputs]` with each value rounded to a byte."""
    num_outputs, num_inputs = weight.shape
    panels = _empty_panels(memory, num_outputs, num_inputs, as_bytes=True)
    pack_rows_as_bytes(weight, panels, 0, 1)
    return panels


def _biases(files: TensorSource, names: list[str], rotated: int = 0) -> np.ndarray:
    biases = [files.read(f"{name}.bias") for name in names]
    if rotated:
        biases[:2] = [halves_first(bias, rotated) for bias in biases[:2]]
    return np.concatenate(biases)


def _empty_panels(
    memory: WeightMemory, num_outputs: int, num_inputs: int, as_bytes: bool
) -> np.ndarray:
    depth = num_inputs + SCALE_ROWS if as_bytes else num_inputs
    shape = (-(-num_outputs // LANES), depth, LANES)
    return memory.zeros(shape, np.dtype(np.int8 if as_bytes else np.float32))
