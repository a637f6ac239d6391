"""Tiny configurations of kin of Llama and Qwen, and what Mixtral calls its tensors."""

from __future__ import annotations

from typing import Any

TINY_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
}


def newer_configs(common: dict[str, Any], llama: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Configurations by name, made of what all families have and of Llama's."""
    return {
        "mixtral": llama
        | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1000000.0,
            "sliding_window": None,
        },
        "ministral3": llama
        | {
            "architectures": ["Ministral3ForCausalLM"],
            "model_type": "ministral3",
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 128,
                "max_position_embeddings": 2048,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        "granite": llama
        | {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "tie_word_embeddings": True,
            "embedding_multiplier": 0.15,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.22,
            "logits_scaling": 2.0,
        },
        "qwen2_5_vl": common
        | {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": 32,
            "max_window_layers": 1,
            "vision_config": TINY_VISION,
        },
        "qwen3_vl": common
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3_vl_text",
            "head_dim": 32,
            "rope_theta": 5000000.0,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": False,
        },
    }


_OF_MIXTRAL = {
    "block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.",
}  # fmt: skip


def usual_name(name: str) -> str:
    """What other families call a tensor of Mixtral's experts."""
    if ".block_sparse_moe." in name:
        for stored, usual in _OF_MIXTRAL.items():
            name = name.replace(stored, usual)
    return name
