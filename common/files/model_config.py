"""What routers and nodes read alike in config.json: its text model, and the longest context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_POSITIONS = 1 << 40
"""Far beyond any model: a file with larger numbers is broken, and would take memory."""


TEXT_MODELS = {"gemma3_text": "Gemma3ForCausalLM", "mistral": "MistralForCausalLM"}
"""The architectures of text models within models with images, by their `model_type`."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
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
    kind = section.get("model_type") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(kind, str) or kind not in TEXT_MODELS:
        return _with_rotary_positions(config)
    outer = {key: value for key, value in config.items() if key != "text_config"}
    inner = {key: value for key, value in section.items() if value is not None}
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
    the original context: longer sequences have other frequencies.
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
    if kind == "longrope":
        return min(positions, int(original) or positions)
    factor = _possible(scaling.get("factor"))
    return max(positions, int(original * factor))


def _possible(value: object) -> float:
    """Return a number that YaRN may have, 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if 0 < value <= MOST_POSITIONS else 0
