"""GGUF files of heads that are rotated in part, and of GLM: what their keys and tensors have to be.

That values are those of safetensors is tested beside `gguf_weights`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from engine.runner.weights.spec.rope_spec import LongRopeSpec
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from tests.support.models.tiny_checkpoints import CONFIGS
from tests.support.models.tiny_gguf import write_gguf

PHI = "phi3.rope.scaling"


def spec_of(folder: Path, name: str, keys: dict[str, Any]) -> DecoderSpec:
    """The decoder of a file with some keys changed; None takes one away."""
    write_gguf(folder / "model.gguf", CONFIGS[name], {}, keys)
    made = folder / "made"
    made.mkdir()
    make_gguf_folder(folder / "model.gguf", made)
    return read_decoder_spec(made)


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("glm4", "glm4.rope.dimension_count", 15, "is 15: wanted RoPE over an even part of the"),
        ("glm4", "glm4.rope.dimension_count", 34, "is 34: wanted RoPE over an even part of the"),
        ("glm4", "glm4.rope.dimension_count", 0, "is 0: wanted RoPE over an even part of the"),
        ("qwen3", "qwen3.rope.dimension_count", 16, "is 16: wanted RoPE over the whole head"),
        ("glm4", "glm4.rope.dimension_sections", 8, "is 8: wanted positions of texts alone"),
        ("phi4_mini", "phi3.attention.sliding_window", 511, "is 511: wanted attention to all"),
        ("phi4_mini", f"{PHI}.original_context_length", None, "is missing: wanted an integer"),
        ("phi4_mini", f"{PHI}.original_context_length", 1, "is 1: wanted at least 2"),
        ("phi4_mini", f"{PHI}.type", "yarn", "is 'yarn': wanted longrope"),
        ("phi4_mini", "phi3.rope.dimension_count", 8, "short.weight is of shape (6,): wanted (4,)"),
        ("glm4_moe", "glm4moe.expert_gating_func", 1, "is 1: wanted 2, sigmoid"),
        ("glm4_moe", "glm4moe.expert_group_count", 2, "is 2: wanted experts without groups"),
        ("glm4_moe", "glm4moe.expert_shared_count", None, "is missing: wanted an integer"),
    ],
)
def test_what_cannot_be_is_named(
    tmp_path: Path, name: str, key: str, value: Any, said: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)) as error:
        spec_of(tmp_path, name, {key: value})
    assert key in str(error.value) or "rope_factors" in str(error.value)


def test_a_head_may_be_rotated_wholly(tmp_path: Path) -> None:
    assert spec_of(tmp_path, "glm4", {"glm4.rope.dimension_count": 32}).rotated_dim == 0


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    """Files of Phi-4-mini state one of twice the context."""
    assert spec_of(tmp_path, "phi4_mini", {"phi3.attention.sliding_window": 1024}).windows == ()


@pytest.mark.parametrize(("stated", "factor"), [(1.5, 1.5), (None, 1.0)])
def test_the_attention_factor_of_longrope_is_the_file_s(
    tmp_path: Path, stated: float | None, factor: float
) -> None:
    rope = spec_of(tmp_path, "phi4_mini", {f"{PHI}.attn_factor": stated}).rope
    assert isinstance(rope, LongRopeSpec)
    assert rope.attention_factor == factor


def test_weights_of_experts_are_scaled_and_normed_as_the_file_says(tmp_path: Path) -> None:
    """Without the keys they are neither, as in llama.cpp."""
    keys = ("expert_weights_scale", "expert_weights_norm", "expert_gating_func")
    spec = spec_of(tmp_path, "glm4_moe", {f"glm4moe.{key}": None for key in keys})
    assert spec.experts is not None
    assert spec.experts.weight_scale == 1.0
    assert not spec.experts.is_normalised
    assert spec.experts.is_sigmoid


def test_layers_that_draft_are_not_counted(tmp_path: Path) -> None:
    """With or without the key that counts them."""
    keys = {"glm4moe.nextn_predict_layers": None}
    assert spec_of(tmp_path, "glm4_moe", keys).num_layers == 2
