"""Tiny random checkpoints of every family, the same bytes wherever they are made.

Weights come from numpy's frozen `RandomState` stream, so logits computed elsewhere from the same
recipe can be stored and compared.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.runner.weights.stored_formats import dequantise, quantise
from tests.support.models.fused_experts import in_gpt_oss_form
from tests.support.tiny_kin import newer_configs

VOCAB_SIZE = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_ERNIE = _COMMON | {
    "architectures": ["Ernie4_5ForCausalLM"],
    "model_type": "ernie4_5",
    "head_dim": 32,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
_QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_ERNIE_MOE = _ERNIE | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 48,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
_YARN_OVER_64 = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4}
_GLM4_MOE = _COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 32,
    "rope_theta": 1000000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
}
_GLM = _COMMON | {
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_GPT_OSS = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 32,
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 24,
}
_GEMMA = {key: value for key, value in _COMMON.items() if key != "hidden_act"} | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 29,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama_tied_biased": _LLAMA
    | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama_linear": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_llama3": _LLAMA
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "llama_yarn": _LLAMA
    | {
        "max_position_embeddings": 32,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "mistral": _LLAMA
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "mistral_yarn": _LLAMA
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 3.0,
            "beta_slow": 0.5,
            "mscale": 1.5,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
    "mistral_window": _LLAMA
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rope_theta": 10000.0,
        "sliding_window": 37,
    },
    "qwen2": _COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
    "mimo": _COMMON
    | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "rope_theta": 640000.0,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    },
    "qwen3": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "phi3": _COMMON
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "rope_theta": 250000.0,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    },
    "phi4_mini": _COMMON
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 128,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 3.0],
            "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 16.0],
        },
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "glm": _GLM | {"architectures": ["GlmForCausalLM"], "model_type": "glm"},
    "glm4": _GLM
    | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": False},
    "glm4_yarn": _GLM
    | {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "max_position_embeddings": 64,
        "rope_scaling": _YARN_OVER_64 | {"type": "yarn"},
    },
    "qwen3_yarn": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 80,
        "rope_scaling": {"rope_type": "yarn"} | _YARN_OVER_64,
    },
    "qwen3_mixed": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "num_hidden_layers": 4,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen2_last_layers": _COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 53,
        "max_window_layers": 1,
    },
    "smollm3": _LLAMA
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "rope_theta": 50000.0,
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        "no_rope_layers": [1, 0, 1, 0],
        "pad_token_id": 0,
    },
    "seed_oss": _COMMON
    | {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "head_dim": 32,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
    },
    "gemma3": _GEMMA
    | {
        "rope_theta": 1000000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 10000.0,
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
    },
    "gemma3_newer": _GEMMA
    | {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "ernie": _ERNIE,
    "ernie_biased": _ERNIE | {"use_bias": True, "tie_word_embeddings": False},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_mixed": _QWEN3_MOE
    | {"mlp_only_layers": [0], "norm_topk_prob": False, "tie_word_embeddings": True},
    "ernie_moe": _ERNIE_MOE,
    "ernie_moe_untied": _ERNIE_MOE
    | {
        "tie_word_embeddings": False,
        "moe_num_shared_experts": 0,
        "mlp_layer_types": ["sparse"] * 2,
    },
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_air": {k: v for k, v in _GLM4_MOE.items() if k != "partial_rotary_factor"}
    | {
        "use_qk_norm": False,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "gpt_oss": _GPT_OSS
    | {
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "initial_context_length": 64,
        "experts_per_token": 3,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    "gpt_oss_newer": _GPT_OSS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "swiglu_alpha": 1.25,
        "swiglu_limit": 0.75,
        "rms_norm_eps": 1e-6,
    },
    **newer_configs(_COMMON, _LLAMA),
}
"""Layers of the last eight here have experts; of ERNIE, GLM and `qwen3_moe_mixed` the first has
none."""


def has_bias(config: Mapping[str, Any], part: str) -> bool:
    """Whether the projections of `part` (qkv, output or mlp) have biases in this family."""
    if config["model_type"] in ("qwen2", "qwen2_5_vl", "mimo"):
        return part == "qkv"
    if config["model_type"].startswith("ernie4_5"):
        return bool(config.get("use_bias", False))
    if config["model_type"] == "gpt_oss":
        return bool(config.get("attention_bias", True))
    if config["model_type"] == "seed_oss":
        key = {"qkv": "attention_bias", "output": "attention_out_bias", "mlp": "mlp_bias"}[part]
        return bool(config.get(key, part == "qkv"))
    if config["model_type"].startswith("glm"):
        return part == "qkv" and bool(config["attention_bias"])
    return bool(config.get("mlp_bias" if part == "mlp" else "attention_bias", False))


def has_head_norms(config: Mapping[str, Any]) -> bool:
    """Whether the heads of queries and keys have norms."""
    kind = config["model_type"]
    return kind.startswith("qwen3") or kind == "gemma3_text" or bool(config.get("use_qk_norm"))


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether the MLP of this layer is a mixture of experts."""
    if config["model_type"] == "qwen3_moe":
        return layer not in config["mlp_only_layers"]
    if config["model_type"] in ("gpt_oss", "mixtral"):
        return True
    first = config.get("moe_layer_start_index", config.get("first_k_dense_replace"))
    return first is not None and bool(layer >= first)


def weights_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint, float32, by its Hugging Face name.

    Those of experts are by the names that a tensor for each has, whatever files store.
    """
    # Gemma 3 stores norms less one.
    add = _Tensors(seed, 0.0 if config["model_type"] == "gemma3_text" else 1.0)
    hidden = config["hidden_size"]
    add("model.embed_tokens.weight", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        _add_layer(add, config, f"model.layers.{layer}.", has_experts(config, layer))
    add("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", config["vocab_size"], hidden)
    return add.tensors


def mtp_weights_of(
    config: Mapping[str, Any], layout: str, seed: int = 0, index: int = 0
) -> dict[str, np.ndarray]:
    """The tensors of an MTP layer as `layout` (deepseek, ernie or mimo) names them.

    Weights are such that rounding them to bytes, as the CPU kernels do, changes nothing.
    """
    add = _Tensors(100 + seed)
    hidden = config["hidden_size"]
    if layout == "deepseek":
        prefix = f"model.layers.{config['num_hidden_layers'] + index}."
        layer, projection = prefix, f"{prefix}eh_proj"
        norms = [f"{prefix}{name}" for name in ("enorm", "hnorm", "shared_head.norm")]
    elif layout == "ernie":
        layer, projection = f"model.mtp_block.{index}.", f"model.mtp_linear_proj.{index}"
        norms = [f"model.mtp_{name}_norm.{index}" for name in ("emb", "hidden")]
    else:
        prefix = f"model.mtp_layers.{index}."
        layer, projection = prefix, f"{prefix}input_proj"
        norms = [f"{prefix}{name}_layernorm" for name in ("token", "hidden", "final")]
    for name in norms:
        add(f"{name}.weight", hidden)
    add(f"{projection}.weight", hidden, 2 * hidden)
    if layout == "ernie" and config.get("use_bias"):
        add(f"{projection}.bias", hidden)
    _add_layer(add, config, layer)
    tensors = add.tensors
    for name, weight in tensors.items():
        if name == f"{projection}.weight":
            halves = [in_bytes(weight[:, :hidden]), in_bytes(weight[:, hidden:])]
            tensors[name] = np.concatenate(halves, axis=1)
        elif weight.ndim == 2:
            tensors[name] = in_bytes(weight)
    return tensors


def in_bytes(weight: np.ndarray) -> np.ndarray:
    """Return the weight as groups of bytes have it; unchanged if groups do not divide its rows."""
    if weight.shape[1] % 32:
        return weight
    return dequantise(quantise(weight, "Q8_0"))


class _Tensors:
    """Draws one tensor after the other."""

    def __init__(self, seed: int, norm_mean: float = 1.0) -> None:
        self._norm_mean = norm_mean
        self._random = np.random.RandomState(seed)
        self.tensors: dict[str, np.ndarray] = {}

    def __call__(self, name: str, *shape: int) -> None:
        values = self._random.standard_normal(shape)
        if name.endswith("sinks"):
            pass
        elif len(shape) == 2:
            values *= 1.5 / math.sqrt(shape[1])
        elif name.endswith(".bias"):
            values *= 0.3
        else:
            values = 0.2 * values + self._norm_mean
        self.tensors[name] = values.astype(np.float32)


def _add_layer(
    add: _Tensors, config: Mapping[str, Any], prefix: str, with_experts: bool = False
) -> None:
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = (config[f"num_{n}_heads"] * head_dim for n in ("attention", "key_value"))
    parts = [("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
    if config["model_type"] == "phi3":
        parts = [("self_attn.qkv_proj", query + 2 * kv)]
    for name, part, num_outputs, num_inputs in (
        *((name, "qkv", num_outputs, hidden) for name, num_outputs in parts),
        ("self_attn.o_proj", "output", hidden, query),
    ):
        add(f"{prefix}{name}.weight", num_outputs, num_inputs)
        if has_bias(config, part):
            add(f"{prefix}{name}.bias", num_outputs)
    if config["model_type"] == "gpt_oss":
        add(f"{prefix}self_attn.sinks", config["num_attention_heads"])
    if with_experts:
        _add_experts(add, config, prefix)
    else:
        _add_mlp(add, config, f"{prefix}mlp", config["intermediate_size"], has_bias(config, "mlp"))
    add(f"{prefix}input_layernorm.weight", hidden)
    add(f"{prefix}post_attention_layernorm.weight", hidden)
    if config["model_type"] == "gemma3_text":
        add(f"{prefix}pre_feedforward_layernorm.weight", hidden)
        add(f"{prefix}post_feedforward_layernorm.weight", hidden)
    if config["model_type"] == "glm4":
        add(f"{prefix}post_self_attn_layernorm.weight", hidden)
        add(f"{prefix}post_mlp_layernorm.weight", hidden)
    if has_head_norms(config):
        add(f"{prefix}self_attn.q_norm.weight", head_dim)
        add(f"{prefix}self_attn.k_norm.weight", head_dim)


def _add_mlp(
    add: _Tensors, config: Mapping[str, Any], part: str, inner: int, with_bias: bool
) -> None:
    hidden = config["hidden_size"]
    parts, down = [("gate_proj", inner), ("up_proj", inner)], "down_proj"
    if config["model_type"] == "mixtral":
        parts, down = [("w1", inner), ("w3", inner)], "w2"
    if config["model_type"] in ("phi3", "glm", "glm4"):
        parts = [("gate_up_proj", 2 * inner)]
    for name, num_outputs, num_inputs in (
        *((name, num_outputs, hidden) for name, num_outputs in parts),
        (down, hidden, inner),
    ):
        add(f"{part}.{name}.weight", num_outputs, num_inputs)
        if with_bias:
            add(f"{part}.{name}.bias", num_outputs)


def _add_experts(add: _Tensors, config: Mapping[str, Any], prefix: str) -> None:
    is_gpt_oss = config["model_type"] == "gpt_oss"
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    part = f"{prefix}{'block_sparse_moe' if config['model_type'] == 'mixtral' else 'mlp'}"
    keys = ("num_experts", "moe_num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(config[key] for key in keys if key in config)
    add(f"{part}.gate.weight", num_experts, config["hidden_size"])
    if is_gpt_oss:
        add(f"{prefix}mlp.gate.bias", num_experts)
    for index in range(num_experts):
        _add_mlp(add, config, f"{part}.experts.{index}", inner, is_gpt_oss)
    if config["model_type"] == "ernie4_5_moe":
        add(f"{prefix}mlp.moe_statics.e_score_correction_bias", 1, num_experts)
    elif config["model_type"] == "glm4_moe":
        add(f"{prefix}mlp.gate.e_score_correction_bias", num_experts)
    num_shared = config.get("moe_num_shared_experts", config.get("n_shared_experts", 0))
    if shared := num_shared * inner:
        _add_mlp(add, config, f"{prefix}mlp.shared_experts", shared, False)


_INTEGERS = {np.dtype(np.int32): "I32", np.dtype(np.uint8): "U8"}


def stored_bytes(values: np.ndarray, dtype: str) -> bytes:
    """`values` as a safetensors dtype; BF16 by cutting off the lower half. Integers stay so."""
    if values.dtype in _INTEGERS:
        return values.tobytes()
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def write_safetensors(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    dtype: str = "F32",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """A safetensors file, written by its specification."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = stored_bytes(values, dtype)
        offsets = [len(data), len(data) + len(raw)]
        kind = _INTEGERS.get(values.dtype, dtype)
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps({"__metadata__": dict(metadata or {"format": "pt"}), **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], *, seed: int = 0, num_shards: int = 1,
    dtype: str = "F32", extra: Mapping[str, np.ndarray] | None = None,
) -> Path:  # fmt: skip
    """A Hugging Face folder; with `num_shards` above 1, files of their own and an index.

    `extra` are further tensors in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    tensors = weights_of(config, seed) | dict(extra or {})
    if config["model_type"] == "gpt_oss":
        tensors = in_gpt_oss_form(tensors)
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        write_safetensors(folder / file_name, part, dtype)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that depend on length and seed alone."""
    return [int(t) for t in np.random.RandomState(1000 + seed).randint(3, VOCAB_SIZE, length)]
