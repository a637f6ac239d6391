"""Folders that call some tensors otherwise: GLM's norms, Mixtral's experts, layers not read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.mtp.mtp_weights import read_mtp_weights
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.decoder_tensors import CHOICE_BIAS, expected_shapes
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.support.models.hub_formats import Gptq, pack_folder
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    weights_of,
    write_checkpoint,
    write_safetensors,
)
from tests.support.tiny_kin import usual_name

PREFIX = "model.layers.1."
NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
BIAS = f"{PREFIX}mlp.gate.e_score_correction_bias"


def _open(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_decoder_spec(folder))


@pytest.mark.parametrize("name", ["glm4", "glm4_moe", "mixtral"])
def test_all_tensors_have_the_names_of_the_decoder(tmp_path: Path, name: str) -> None:
    checkpoint = _open(write_checkpoint(tmp_path, CONFIGS[name]))
    shapes = expected_shapes(read_decoder_spec(tmp_path))
    assert sorted(checkpoint.names()) == sorted(shapes)
    for tensor, shape in shapes.items():
        assert checkpoint.read(tensor).shape == checkpoint.shape(tensor) == shape


def test_each_norm_is_the_one_at_its_place(tmp_path: Path) -> None:
    checkpoint = _open(write_checkpoint(tmp_path, CONFIGS["glm4"]))
    values = weights_of(CONFIGS["glm4"])
    for ours, stored in NORMS.items():
        found = checkpoint.read(f"{PREFIX}{ours}.weight")
        np.testing.assert_array_equal(found, values[f"{PREFIX}{stored}.weight"], ours)


def test_the_bias_of_the_choice_is_a_row(tmp_path: Path) -> None:
    checkpoint = _open(write_checkpoint(tmp_path, CONFIGS["glm4_moe"]))
    found = checkpoint.read(f"{PREFIX}{CHOICE_BIAS}")
    np.testing.assert_array_equal(found, weights_of(CONFIGS["glm4_moe"])[BIAS][None])


def test_each_matrix_of_mixtrals_experts_is_the_one_at_its_place(tmp_path: Path) -> None:
    checkpoint = _open(write_checkpoint(tmp_path, CONFIGS["mixtral"]))
    values = weights_of(CONFIGS["mixtral"])
    experts = f"{PREFIX}block_sparse_moe."
    for ours, stored in {
        "gate": "gate",
        "experts.7.gate_proj": "experts.7.w1",
        "experts.7.down_proj": "experts.7.w2",
        "experts.7.up_proj": "experts.7.w3",
    }.items():
        found = checkpoint.read(f"{PREFIX}mlp.{ours}.weight")
        np.testing.assert_array_equal(found, values[f"{experts}{stored}.weight"], ours)


@pytest.mark.parametrize(
    ("name", "tensor", "wanted"),
    [
        ("mixtral", f"{PREFIX}block_sparse_moe.experts.3.w2.weight", "[64, 96]"),
        ("glm4", f"{PREFIX}post_mlp_layernorm.weight", "[64]"),
        ("glm4_moe", BIAS, "[8]"),
    ],
)
@pytest.mark.parametrize("is_missing", [True, False])
def test_what_is_wrong_has_the_name_in_the_files(
    tmp_path: Path, name: str, tensor: str, wanted: str, is_missing: bool
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[name])
    tensors = weights_of(CONFIGS[name])
    values = tensors.pop(tensor)
    if not is_missing:
        tensors[tensor] = values[None]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as error:
        _open(folder)
    assert f"tensor {tensor}" in str(error.value)
    assert f"wants {wanted}" in str(error.value) or f"wanted shape {wanted}" in str(error.value)


def test_layers_that_draft_are_not_read_and_not_used(tmp_path: Path) -> None:
    """Files of GLM-4.5 have one behind the last layer, with experts of its own."""
    config = CONFIGS["glm4_moe"]
    layer = {
        name.replace("layers.1.", "layers.2."): values
        for name, values in weights_of(config).items()
        if name.startswith(PREFIX)
    }
    layer |= {
        f"model.layers.2.{name}.weight": np.ones(shape, np.float32)
        for name, shape in {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,)}.items()
    }
    folder = write_checkpoint(tmp_path, config, extra=layer)
    checkpoint, spec = _open(folder), read_decoder_spec(folder)
    assert spec.num_layers == 2
    with pytest.raises(CheckpointError, match="has a mixture of experts: wanted a dense layer"):
        read_mtp_weights("", folder, checkpoint, spec)


def test_experts_of_mixtral_that_are_quantised(tmp_path: Path) -> None:
    config = CONFIGS["mixtral"] | {"intermediate_size": 32, "num_hidden_layers": 1}
    values = pack_folder(tmp_path, config, weights_of(config), Gptq(group_size=32))
    checkpoint = _open(tmp_path)
    for stored, wanted in values.items():
        np.testing.assert_array_equal(checkpoint.read(usual_name(stored)), wanted, stored)
    assert checkpoint.format_and_shape("model.layers.0.mlp.experts.7.up_proj.weight")[0] != "F32"
