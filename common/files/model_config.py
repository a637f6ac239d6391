"""What routers and nodes read alike in config.json: its text model, and the longest context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_POSITIONS = 1 << 40
"""Far beyond any model: a file with larger numbers is broken, and would take memory."""


TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
"""The architectures of text models within models with images, by their `model_type`."""
_FLAT = {"qwen2_5_vl": "qwen2_5_vl_text"}
"""Models with images whose older files have the text model's keys beside the others."""
_TIED = "tie_word_embeddings"
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
    "qwen2_5_vl_text": {
        "vocab_size": 152064,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_window_layers": 80,
    },
    "qwen3_vl_text": {
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
    },
    "qwen3_vl_moe_text": {
        "vocab_size": 151936,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
    },
}
"""Values that such a file leaves out where they are those of the family's first model."""
_GPT_OSS = "GptOssForCausalLM"
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary positions of gpt-oss where config.json has no section for them, as in transformers."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of `config` that describes a model of texts.

    Models with images, as Gemma 3 from 4B on and Mistral Small 3, have it in `text_config`. Keys
    beside it, such as the end tokens, are kept where it has no value of its own. gpt-oss has its
    rotary positions also where none are stated. A configuration of another kind is returned as it
    is.
    """
    section = config.get("text_config")
    flat = config.get("model_type")
    if section is None and isinstance(flat, str) and flat in _FLAT:
        section = {"model_type": _FLAT[flat]}
    kind = section.get("model_type") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(kind, str) or kind not in TEXT_MODELS:
        return _with_rotary_positions(config)
    outer = {key: value for key, value in config.items() if key != "text_config"}
    inner = {key: value for key, value in section.items() if value is not None}
    if kind.startswith("qwen3_vl") and config.get(_TIED) is not None:
        inner[_TIED] = config[_TIED]  # the whole model's counts, as in transformers
    return {**_DEFAULTS.get(kind, {}), **outer, **inner, "architectures": [TEXT_MODELS[kind]]}


def _with_rotary_positions(config: Mapping[str, Any]) -> Mapping[str, Any]:
    names = config.get("architectures")
    is_gpt_oss = isinstance(names, list) and names[:1] == [_GPT_OSS]
    if not is_gpt_oss or config.get("rope_parameters") or config.get("rope_scaling"):
        return config
    return {**config, "rope_parameters": _GPT_OSS_ROPE}


def longest_context(config: Mapping[str, Any]) -> int:
    """Return the most tokens of a sequence; `max_position_embeddings` of `config` was checked.

    With YaRN it is at least `factor` times the original context: where users add YaRN to a
    checkpoint, `max_position_embeddings` often stays that of the model before. It is never less
    than `max_position_embeddings`, and values that nodes refuse change nothing. With LongRoPE it is
    the original context: longer sequences have other frequencies. So it is with
    `llama_4_scaling_beta`, by which queries behind it are multiplied by more than 1.
    """
    positions: int = config["max_position_embeddings"]
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    beside = config
    if isinstance(scaling, Mapping) and "full_attention" in scaling:
        # By the kind of a layer: those with a window limit nothing.
        scaling = beside = scaling["full_attention"]
    if not isinstance(scaling, Mapping):
        return positions
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind not in ("yarn", "longrope"):
        return positions
    key = "original_max_position_embeddings"
    original = _possible(beside.get(key) or scaling.get(key))
    if kind == "longrope" or _possible(scaling.get("llama_4_scaling_beta")):
        return min(positions, int(original) or positions)
    factor = _possible(scaling.get("factor"))
    return max(positions, int(original * factor))


def _possible(value: object) -> float:
    """Return a number that YaRN may have, 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if 0 < value <= MOST_POSITIONS else 0
