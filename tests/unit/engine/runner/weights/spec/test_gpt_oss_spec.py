"""config.json of gpt-oss: what may be left out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
from engine.runner.weights.spec.expert_mixture import ClampedSwish
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from engine.runner.weights.spec.rope_spec import YarnSpec

HUB = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""The keys of the model of 20 billion weights, as hubs have it."""
LEFT_OUT = (
    *("attention_bias", "experts_per_token", "head_dim", "hidden_act", "initial_context_length"),
    *("layer_types", "rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window"),
    *("swiglu_limit", "tie_word_embeddings", "num_experts_per_tok"),
)


def _spec(folder: Path, **changed: Any) -> DecoderSpec:
    config = {key: one for key, one in (HUB | changed).items() if one != "left out"}
    (folder / "config.json").write_text(json.dumps(config))
    return read_decoder_spec(folder)


def test_the_model_on_hubs(tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    assert (spec.num_layers, spec.head_dim, spec.max_position) == (24, 64, 131072)
    assert spec.windows == (128, 0) * 12
    assert spec.has_sinks
    assert (spec.has_qkv_bias, spec.has_output_bias, spec.has_mlp_bias) == (True, True, False)
    assert spec.rope == YarnSpec(
        kind="yarn", theta=150000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=32.0,
        original_max_position=4096, attention_factor=1.3465735902799727, has_whole_bounds=False,
    )  # fmt: skip
    mixture = spec.experts
    assert mixture is not None
    assert (mixture.num_experts, mixture.num_chosen, mixture.inner_size) == (32, 4, 2880)
    assert mixture.layers == tuple(range(24))
    assert (mixture.has_biases, mixture.has_gate_bias, mixture.is_normalised) == (True,) * 3
    assert mixture.clamped_swish == ClampedSwish(steepness=1.702, limit=7.0)


def test_what_transformers_fills_in_may_be_left_out(tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    assert _spec(tmp_path, **dict.fromkeys(LEFT_OUT, "left out")) == spec
    assert _spec(tmp_path, rope_scaling=None) == spec
    newer = {"rope_theta": 150000, **HUB["rope_scaling"]}  # type: ignore[dict-item]
    assert _spec(tmp_path, rope_scaling="left out", rope_parameters=newer) == spec


def test_numbers_of_a_file_count(tmp_path: Path) -> None:
    spec = _spec(tmp_path, swiglu_limit=5.0, swiglu_alpha=2.0, attention_bias=False)
    assert spec.experts is not None
    assert spec.experts.clamped_swish == ClampedSwish(steepness=2.0, limit=5.0)
    assert (spec.has_qkv_bias, spec.has_output_bias) == (False, False)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"experts_per_token": 8}, "experts_per_token is 8: wanted num_experts_per_tok, 4"),
        (
            {"initial_context_length": 8192},
            "initial_context_length is 8192: wanted original_max_position_embeddings, 4096",
        ),
        (
            {"rope_scaling": "left out", "initial_context_length": 8192},
            "initial_context_length is 8192: wanted original_max_position_embeddings, 4096",
        ),
        (
            {"num_experts_per_tok": 33, "experts_per_token": None},
            r"num\w+ is 33: wanted at most num_local",
        ),
        ({"swiglu_limit": 0}, "swiglu_limit is 0: wanted a number above 0"),
        ({"swiglu_alpha": "1.702"}, "swiglu_alpha is '1.702': wanted a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': wanted silu"),
        ({"num_local_experts": 0}, "num_local_experts is 0: wanted a whole number"),
        ({"sliding_window": None}, "sliding_window is None: wanted a window"),
        (
            {"layer_types": ["chunked_attention"] * 24},
            "layer_types is .*: wanted a list of full_attention and sliding_attention",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters is .*: wanted the same rotary positions in all layers",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {said}"):
        _spec(tmp_path, **changed)
