"""GGUF files of tiny models, in any formats, and folders with the same values in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import quants

from engine.runner.weights.derived.fused_weights import fused_projections, fused_shapes
from engine.runner.weights.derived.other_names import stored_shapes
from engine.runner.weights.gguf_weights import gguf_place
from engine.runner.weights.spec.decoder_tensors import expected_shapes
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.stored_formats import dequantise
from engine.runner.weights.stored_tensor import GroupedTensor
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from tests.support.models.packing import stored
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    VOCAB_SIZE,
    weights_of,
    write_checkpoint,
    write_safetensors,
)
from tests.support.tiny_kin import usual_name

FAMILIES = (
    *("llama", "qwen2", "qwen3", "qwen3_yarn", "phi3", "phi4_mini", "ernie", "ernie_biased"),
    *("gemma3", "glm4", "glm4_yarn"),
)
"""Names of `CONFIGS` whose architectures GGUF files have, without experts."""
MIXTURES = ("qwen3_moe", "ernie_moe", "ernie_moe_untied", "glm4_moe", "glm4_moe_air", "gpt_oss")
"""The same, with a mixture of experts."""
_ARCHITECTURES = {
    "qwen3_moe": "qwen3moe", "ernie4_5_moe": "ernie4_5-moe", "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss", "mixtral": "llama", "ministral3": "mistral3",
    "qwen2_5_vl": "qwen2vl", "qwen3_vl_text": "qwen3vl",
}  # fmt: skip
"""By `model_type`, where GGUF files call it otherwise."""
K_MIXTURE = CONFIGS["qwen3_moe"] | {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "moe_intermediate_size": 256,
}  # fmt: skip
K_CONFIG = CONFIGS["qwen3"] | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Models all of whose rows are whole groups of 256."""
_K_SCALE = 1e-4
"""Scale of groups of any bits that makes values about as large as those of `weights_of`."""


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of heads with halves first as llama.cpp's converter stores them for `llama`."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def metadata_of(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    windows = {}
    if family == "gemma3":
        windows = {
            f"{family}.attention.sliding_window": config["sliding_window"],
            f"{family}.rope.scaling.type": "linear",
            f"{family}.rope.scaling.factor": config["rope_scaling"]["factor"],
        }
    if family == "gpt-oss":
        windows = {f"{family}.attention.sliding_window": config["sliding_window"]}
    if family == "granite":
        windows = {
            "granite.embedding_scale": config["embedding_multiplier"],
            "granite.residual_scale": config["residual_multiplier"],
            "granite.attention.scale": config["attention_multiplier"],
            "granite.logit_scale": config["logits_scaling"],
        }
    if family == "mistral3":
        growth = config["rope_parameters"]["llama_4_scaling_beta"]
        windows = {"mistral3.attention.temperature_scale": growth}
    return windows | {
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{family}.rope.freq_base": float(
            config.get("rope_parameters", {}).get("rope_theta") or config["rope_theta"]
        ),
        f"{family}.rope.dimension_count": rotated_of(config, head_dim),
        **_expert_metadata(family, config),
        **{f"{family}.rope.scaling.{key}": value for key, value in scaling_of(config).items()},
    }


def rotated_of(config: Mapping[str, Any], head_dim: int) -> int:
    """How many of a head's dimensions are rotated."""
    section = config.get("rope_parameters", {})
    share = section.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return round(head_dim * float(share))


def scaling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for YaRN, and for the LongRoPE of Phi."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters", {})
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        growth = math.log(config["max_position_embeddings"] / original) / math.log(original)
        return {"original_context_length": original, "attn_factor": math.sqrt(1 + growth)}
    if kind != "yarn":
        return {}
    return {
        "type": "yarn",
        "factor": float(scaling["factor"]),
        "original_context_length": scaling["original_max_position_embeddings"],
        "yarn_beta_fast": float(scaling["beta_fast"]),
        **{
            f"yarn_{name}": scaling[key]
            for name, key in (("beta_slow", "beta_slow"), ("log_multiplier", "mscale_all_dim"))
            if key in scaling
        },
        "finetuned": True,
    }


def _expert_metadata(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of the experts, and of layers that draft."""
    found: dict[str, Any]
    if family == "qwen3moe":
        found = {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
        }
    elif family == "ernie4_5-moe":
        found = {
            "expert_count": config["moe_num_experts"],
            "expert_used_count": config["moe_k"],
            "interleave_moe_layer_step": config["moe_layer_interval"],
            "leading_dense_block_count": config["moe_layer_start_index"],
            "expert_shared_count": config["moe_num_shared_experts"],
        }
    elif family == "glm4moe":
        found = {
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_shared_count": config["n_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_gating_func": 2,
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": config["norm_topk_prob"],
            "nextn_predict_layers": config["num_nextn_predict_layers"],
            "block_count": config["num_hidden_layers"] + config["num_nextn_predict_layers"],
        }
    elif config["model_type"] == "mixtral":
        found = {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
        }
        return {f"{family}.{key}": value for key, value in found.items()}
    elif family == "gpt-oss":
        found = {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["intermediate_size"],
        }
        return {f"{family}.{key}": value for key, value in found.items()}
    else:
        return {}
    found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return {f"{family}.{key}": value for key, value in found.items()}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    formats: Mapping[str, str],
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write a model's file; return the values it holds, by Hugging Face name.

    `formats` are by part of a tensor's name, such as `q_proj`; others are in F32. The values of K
    types are any bits. `metadata` is added to what the converter writes, or replaces it; None takes
    a key away.
    """
    family = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, family)
    for key, value in (metadata_of(family, config) | dict(metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen2")
    writer.add_array(
        "tokenizer.ggml.tokens", ["a", "b", "ab", *(f"t{i}" for i in range(3, VOCAB_SIZE))]
    )
    writer.add_array("tokenizer.ggml.token_type", [1] * VOCAB_SIZE)
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    values = {}
    tensors: dict[str, tuple[list[np.ndarray], gguf.GGMLQuantizationType]] = {}
    for seed, (name, weight) in enumerate(weights_of(config).items()):
        part = name.split(".")[-2]
        kind = formats.get(part, "F32") if weight.ndim == 2 else "F32"
        kind_type = gguf.GGMLQuantizationType[kind]
        if kind.endswith("_K"):
            tensor = stored(kind, weight.shape[0], weight.shape[1], seed, _K_SCALE)
            raw, values[name] = tensor.rows, dequantise(tensor)
        else:
            raw = quants.quantize(weight, kind_type)
            values[name] = _values(kind, raw, weight.shape)
        if family == "gemma3" and name.endswith("norm.weight"):
            raw = weight + np.float32(1.0)  # as llama.cpp's converter stores those of Gemma
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(part)
        if family in ("llama", "granite", "mistral3") and heads is not None:
            raw = interleaved(raw, config[heads])
        tensors.setdefault(gguf_place(usual_name(name), family).name, ([], kind_type))[0].append(
            raw
        )
    for name, values_of_pairs in _extra_tensors(config).items():
        tensors[name] = ([values_of_pairs], gguf.GGMLQuantizationType.F32)
    for in_gguf, (parts, kind_type) in tensors.items():
        stacked = np.stack(parts) if "_exps." in in_gguf else parts[0]
        writer.add_tensor(in_gguf, stacked, raw_dtype=kind_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _extra_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors that are no weights of the decoder: factors of LongRoPE, and a drafting layer."""
    scaling = config.get("rope_scaling", {})
    found = {
        f"rope_factors_{kind}.weight": np.array(scaling[f"{kind}_factor"], np.float32)
        for kind in ("short", "long")
        if f"{kind}_factor" in scaling
    }
    if config["model_type"] == "glm4_moe":
        prefix, hidden = f"blk.{config['num_hidden_layers']}", config["hidden_size"]
        found[f"{prefix}.nextn.eh_proj.weight"] = np.ones((hidden, 2 * hidden), np.float32)
        found[f"{prefix}.attn_norm.weight"] = np.ones(hidden, np.float32)
    return found


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value < 0:
        writer.add_int32(key, value)
    else:
        writer.add_uint32(key, value)


def _values(kind: str, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    rows = raw.reshape(shape[0], -1) if len(shape) == 2 else raw.reshape(1, -1)
    tensor = GroupedTensor(kind, (len(rows), shape[-1]), rows.view(np.uint8))
    return dequantise(tensor).reshape(shape)


def write_pair(
    folder: Path, config: Mapping[str, Any], formats: Mapping[str, str]
) -> tuple[Path, Path]:
    """Return a folder over a GGUF file, and one with the same values in a safetensors file.

    Both have the same tensors in the same order, which is a part of their identity.
    """
    stored_folder, wide = folder / "stored", folder / "wide"
    stored_folder.mkdir(parents=True)
    values = write_gguf(folder / "model.gguf", config, formats)
    make_gguf_folder(folder / "model.gguf", stored_folder)
    write_wide(wide, config, values)
    return stored_folder, wide


def write_wide(folder: Path, config: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> Path:
    """Return a folder with these values in float32, in the order in which a decoder names them."""
    write_checkpoint(folder, config)
    spec = read_decoder_spec(folder)
    shapes = expected_shapes(spec)
    fused = fused_shapes(shapes, fused_projections(spec.architecture))
    in_order = {name: values[name] for name in stored_shapes(fused, spec)}
    write_safetensors(folder / "model.safetensors", in_order)
    return folder


FORMATS = {
    "embed_tokens": "Q8_0", "q_proj": "Q5_0", "k_proj": "Q4_1", "v_proj": "F16",
    "o_proj": "Q4_0", "gate_proj": "Q5_1", "up_proj": "Q8_0", "down_proj": "Q4_1",
}  # fmt: skip
