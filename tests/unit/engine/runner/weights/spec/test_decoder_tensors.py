"""The names and shapes of a decoder's tensors, where a family has some of its own."""

from __future__ import annotations

import json
from pathlib import Path

from engine.runner.weights.spec.decoder_tensors import layer_shapes
from engine.runner.weights.spec.model_spec import read_decoder_spec

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "default"},
}


def test_gpt_oss_has_sinks_and_biases_of_its_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    spec = read_decoder_spec(tmp_path)
    shapes = layer_shapes(spec, "", spec.mixture_of(1))
    others = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    assert others == {
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
        "self_attn.q_proj.weight": (512, 64),
        "self_attn.q_proj.bias": (512,),
        "self_attn.k_proj.weight": (128, 64),
        "self_attn.k_proj.bias": (128,),
        "self_attn.v_proj.weight": (128, 64),
        "self_attn.v_proj.bias": (128,),
        "self_attn.o_proj.weight": (64, 512),
        "self_attn.o_proj.bias": (64,),
        "self_attn.sinks": (8,),
        "mlp.gate.weight": (4, 64),
        "mlp.gate.bias": (4,),
    }
    for index in range(4):
        part = f"mlp.experts.{index}."
        expert = {
            name.removeprefix(part): shape
            for name, shape in shapes.items()
            if name.startswith(part)
        }
        assert expert == {
            "gate_proj.weight": (96, 64),
            "gate_proj.bias": (96,),
            "up_proj.weight": (96, 64),
            "up_proj.bias": (96,),
            "down_proj.weight": (64, 96),
            "down_proj.bias": (64,),
        }
    assert len(shapes) == len(others) + 4 * 6
