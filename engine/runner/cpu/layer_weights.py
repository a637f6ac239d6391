"""One decoder layer's weights for the CPU kernels.

A mixture-of-experts layer attaches here: `load_layer` takes one MLP's `gate_up` and `down`; with
experts they become one pair per expert, and `kernels.layer` chooses by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.runner.kernels.layer import LayerTables
from engine.runner.kernels.products.packed import PackedWeight
from engine.runner.kernels.vector_ir import LANES
from engine.runner.weights.key_scales import key_scales
from engine.runner.weights.model_spec import DecoderSpec
from engine.runner.weights.rope import halves_first
from engine.runner.weights.tensor_source import TensorSource

NONE_1D = np.zeros(0, np.float32)
NONE_2D = np.zeros((0, 0), np.float32)
"""Stands for an absent bias, norm or residual."""


@dataclass(frozen=True, slots=True)
class NumbaLayer:
    """One layer's weights: the packed ones, and `tables`, by which the kernels read all of them."""

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    tables: LayerTables


def load_layer(
    files: TensorSource,
    prefix: str,
    spec: DecoderSpec,
    packed: Mapping[str, PackedWeight],
    stored: str,
) -> NumbaLayer:
    """Return the layer whose tensors' names begin with `prefix`.

    `packed` has its weights, as `packed_weights.layer_plans` names them. The KV cache stores
    numbers as `stored`.
    """
    divisors = key_scales(files, prefix, spec, stored)
    qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
    rotated = spec.head_dim if spec.is_rope_interleaved else 0
    head_norms = NONE_2D
    if spec.has_head_norms:
        norms = [files.read(f"{prefix}self_attn.{n}_norm.weight") for n in "qk"]
        head_norms = np.stack([halves_first(n, rotated) if rotated else n for n in norms])
    gate_up_bias = NONE_1D
    if spec.has_mlp_bias:
        names = (f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj")
        biases = [files.read(f"{name}.bias").reshape(-1, LANES) for name in names]
        gate_up_bias = np.stack(biases, axis=1).reshape(-1)

    def output_norm(name: str) -> np.ndarray:
        return files.read(f"{prefix}{name}.weight") if spec.has_output_norms else NONE_1D

    products = {name: packed[prefix + name] for name in ("qkv", "output", "gate_up", "down")}
    tables = LayerTables(
        input_norm=files.read(f"{prefix}input_layernorm.weight"),
        qkv=products["qkv"].table,
        qkv_bias=_biases(files, qkv, rotated) if spec.has_qkv_bias else NONE_1D,
        head_norms=head_norms,
        scales=np.stack([np.float32(spec.score_scale) * divisors, 1 / divisors]),
        output=products["output"].table,
        output_bias=(
            _biases(files, [f"{prefix}self_attn.o_proj"]) if spec.has_output_bias else NONE_1D
        ),
        attended_norm=output_norm("post_attention_layernorm"),
        mlp_norm=files.read(f"{prefix}{spec.mlp_norm}.weight"),
        gate_up=products["gate_up"].table,
        gate_up_bias=gate_up_bias,
        down=products["down"].table,
        down_bias=_biases(files, [f"{prefix}mlp.down_proj"]) if spec.has_mlp_bias else NONE_1D,
        mlp_output_norm=output_norm("post_feedforward_layernorm"),
    )
    return NumbaLayer(**products, tables=tables)


def _biases(files: TensorSource, names: list[str], rotated: int = 0) -> np.ndarray:
    biases = [files.read(f"{name}.bias") for name in names]
    if rotated:
        biases[:2] = [halves_first(bias, rotated) for bias in biases[:2]]
    return np.concatenate(biases)
