"""One decoder layer's weights for the CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.runner.cpu.packed_weights import layer_plans
from engine.runner.kernels.experts import ExpertTables
from engine.runner.kernels.layer import LayerTables
from engine.runner.kernels.products.activations import (
    clamped_swish_kernel,
    gelu_kernel,
    silu_kernel,
)
from engine.runner.kernels.products.linear import FIELDS
from engine.runner.kernels.products.packed import PackedWeight
from engine.runner.kernels.vector_ir import LANES
from engine.runner.weights.key_scales import key_scales
from engine.runner.weights.spec.decoder_tensors import (
    CHOICE_BIAS,
    EXPERT_GATE,
    SHARED_EXPERTS,
    SINKS,
)
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.tensor_source import TensorSource

NONE_1D = np.zeros(0, np.float32)
NONE_2D = np.zeros((0, 0), np.float32)
"""Stands for an absent bias, norm or residual."""


_NO_TABLE = np.zeros((0, FIELDS), np.int64)


@dataclass(frozen=True, slots=True)
class NumbaLayer:
    """One layer's weights: the packed ones by their name in `packed_weights.layer_plans`.

    By `tables`, and `experts` where the layer has some, the kernels read all of them.
    """

    packed: Mapping[str, PackedWeight]
    tables: LayerTables
    experts: ExpertTables | None


def load_layer(
    files: TensorSource,
    prefix: str,
    spec: DecoderSpec,
    packed: Mapping[str, PackedWeight],
    stored: str,
    mixture: ExpertMixture | None = None,
) -> NumbaLayer:
    """Return the layer whose tensors' names begin with `prefix`.

    `packed` has its weights, as `packed_weights.layer_plans` names them. The KV cache stores
    numbers as `stored`. `mixture` is that of the layer, None for one with a single MLP.
    """
    divisors = key_scales(files, prefix, spec, stored)
    qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
    head_norms = NONE_2D
    if spec.has_head_norms:
        head_norms = np.stack([files.read(f"{prefix}self_attn.{n}_norm.weight") for n in "qk"])
    products = {
        plan.key.removeprefix(prefix): packed[plan.key]
        for plan in layer_plans(spec, prefix, mixture)
    }
    has_mlp = "gate_up" in products
    mlp = f"{prefix}mlp" if mixture is None else f"{prefix}{SHARED_EXPERTS}"
    has_mlp_bias = has_mlp and spec.has_mlp_bias

    def output_norm(name: str) -> np.ndarray:
        return files.read(f"{prefix}{name}.weight") if spec.has_output_norms else NONE_1D

    tables = LayerTables(
        input_norm=files.read(f"{prefix}input_layernorm.weight"),
        qkv=products["qkv"].table,
        qkv_bias=_biases(files, qkv) if spec.has_qkv_bias else NONE_1D,
        head_norms=head_norms,
        scales=np.stack([np.float32(spec.score_scale) * divisors, 1 / divisors]),
        sinks=files.read(f"{prefix}{SINKS}") if spec.has_sinks else NONE_1D,
        output=products["output"].table,
        output_bias=(
            _biases(files, [f"{prefix}self_attn.o_proj"]) if spec.has_output_bias else NONE_1D
        ),
        attended_norm=output_norm("post_attention_layernorm"),
        mlp_norm=files.read(f"{prefix}{spec.mlp_norm}.weight"),
        gate_up=products["gate_up"].table if has_mlp else _NO_TABLE,
        gate_up_bias=_gate_up_bias(files, mlp) if has_mlp_bias else NONE_1D,
        down=products["down"].table if has_mlp else _NO_TABLE,
        down_bias=_biases(files, [f"{mlp}.down_proj"]) if has_mlp_bias else NONE_1D,
        mlp_output_norm=output_norm("post_feedforward_layernorm"),
    )
    experts = None if mixture is None else _experts(files, prefix, spec, mixture, products)
    return NumbaLayer(products, tables, experts)


def _experts(
    files: TensorSource,
    prefix: str,
    spec: DecoderSpec,
    mixture: ExpertMixture,
    products: Mapping[str, PackedWeight],
) -> ExpertTables:
    gate_bias = choice_bias = NONE_1D
    if mixture.has_gate_bias:
        gate_bias = files.read(f"{prefix}{EXPERT_GATE}.bias")
    if mixture.has_choice_bias:
        choice_bias = files.read(prefix + CHOICE_BIAS).reshape(-1)
    gate_up_bias = down_bias = NONE_2D
    if mixture.has_biases:
        experts = [f"{prefix}mlp.experts.{number}" for number in range(mixture.num_experts)]
        gate_up_bias = np.stack([_gate_up_bias(files, expert) for expert in experts])
        down_bias = np.stack([files.read(f"{expert}.down_proj.bias") for expert in experts])
    return ExpertTables(
        expert_gate=products["expert_gate"].table,
        gate_bias=gate_bias,
        choice_bias=choice_bias,
        gate_up=products["experts_gate_up"].table,
        gate_up_bias=gate_up_bias,
        down=products["experts_down"].table,
        down_bias=down_bias,
        activation=_activation_of_experts(spec, mixture),
        is_sigmoid=mixture.is_sigmoid,
        is_normalised=mixture.is_normalised,
        least_sum=np.float32(mixture.least_sum),
        weight_scale=np.float32(mixture.weight_scale),
    )


def activation_of(spec: DecoderSpec) -> int:
    """Return the address of what is computed of gate and up, compiled now or loaded."""
    return gelu_kernel() if spec.is_gelu else silu_kernel()


def _activation_of_experts(spec: DecoderSpec, mixture: ExpertMixture) -> int:
    clamped = mixture.clamped_swish
    if clamped is None:
        return activation_of(spec)
    return clamped_swish_kernel(clamped.steepness, clamped.limit)


def _gate_up_bias(files: TensorSource, mlp: str) -> np.ndarray:
    """Return the biases of gate and up in turn, sixteen at a time."""
    names = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    biases = [files.read(f"{name}.bias").reshape(-1, LANES) for name in names]
    return np.stack(biases, axis=1).reshape(-1)


def _biases(files: TensorSource, names: list[str]) -> np.ndarray:
    return np.concatenate([files.read(f"{name}.bias") for name in names])
