"""GGUF files of tiny models, in any formats, and folders with the same values in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import quants

from engine.runner.weights.derived.fused_weights import fused_shapes, has_fused_weights
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

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_yarn", "phi3", "ernie", "ernie_biased", "gemma3")
"""Names of `CONFIGS` whose architectures GGUF files have, without experts."""
MIXTURES = ("qwen3_moe", "ernie_moe", "ernie_moe_untied", "gpt_oss")
"""The same, with a mixture of experts."""
_ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
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
    return windows | {
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{family}.rope.freq_base": float(config["rope_theta"]),
        **_expert_metadata(family, config),
        **{f"{family}.rope.scaling.{key}": value for key, value in scaling_of(config).items()},
    }


def scaling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for YaRN."""
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        return {}
    return {
        "type": "yarn",
        "factor": float(scaling["factor"]),
        "original_context_length": scaling["original_max_position_embeddings"],
        "yarn_beta_fast": float(scaling["beta_fast"]),
        "finetuned": True,
    }


def _expert_metadata(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of the experts."""
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
    has_output_norms = family == "gemma3"
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
        if has_output_norms and name.endswith("norm.weight"):
            raw = weight + np.float32(1.0)  # as llama.cpp's converter stores those of Gemma
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(part)
        if family == "llama" and heads is not None:
            raw = interleaved(raw, config[heads])
        place = gguf_place(name, has_output_norms=has_output_norms, has_sinks=family == "gpt-oss")
        tensors.setdefault(place.name, ([], kind_type))[0].append(raw)
    for in_gguf, (parts, kind_type) in tensors.items():
        stacked = np.stack(parts) if "_exps." in in_gguf else parts[0]
        writer.add_tensor(in_gguf, stacked, raw_dtype=kind_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
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
    names = fused_shapes(shapes) if has_fused_weights(spec.architecture) else shapes
    in_order = {name: values[name] for name in names}
    write_safetensors(folder / "model.safetensors", in_order)
    return folder


FORMATS = {
    "embed_tokens": "Q8_0", "q_proj": "Q5_0", "k_proj": "Q4_1", "v_proj": "F16",
    "o_proj": "Q4_0", "gate_proj": "Q5_1", "up_proj": "Q8_0", "down_proj": "Q4_1",
}  # fmt: skip
