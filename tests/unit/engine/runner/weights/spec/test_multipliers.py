"""Granite's multipliers and Ministral's positions, in terms of the one decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError, ConfigError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from tests.support.models.hub_formats import Fp8, Tensor, floats, packed_model, write_tensors
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import CONFIGS, weights_of, write_checkpoint

GRANITE, MINISTRAL = CONFIGS["granite"], CONFIGS["ministral3"]
KEYS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _spec(folder: Path, config: dict[str, Any]) -> DecoderSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_decoder_spec(folder)


def test_the_stream_is_divided_by_the_multiplier_of_residuals(tmp_path: Path) -> None:
    spec = _spec(tmp_path, GRANITE)
    assert spec.embedding_scale == pytest.approx(0.15 / 0.22)
    assert spec.rms_epsilon == pytest.approx(1e-5 / 0.0484)
    assert spec.score_scale == pytest.approx(0.125)
    assert spec.logits_divisor == 2.0


def test_multipliers_that_are_left_out_are_one(tmp_path: Path) -> None:
    spec = _spec(tmp_path, {key: value for key, value in GRANITE.items() if key not in KEYS})
    assert (spec.embedding_scale, spec.rms_epsilon, spec.score_scale) == (1.0, 1e-5, 1.0)
    assert spec.logits_divisor == 1.0


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [0, -1.0, "1", True, 1e5, 1e-5, float("nan")])
def test_multipliers_that_cannot_be_are_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is .*: wanted a number"):
        _spec(tmp_path, GRANITE | {key: value})


def test_the_final_norm_divides_logits(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, GRANITE, dtype="BF16")
    plain = write_checkpoint(tmp_path / "plain", GRANITE | {"logits_scaling": 1.0}, dtype="BF16")
    found, wanted = (Checkpoint(one, read_decoder_spec(one)) for one in (folder, plain))
    assert found.format_and_shape("model.norm.weight") == ("F32", (1, 64))
    for name in wanted.names():
        divisor = 2.0 if name == "model.norm.weight" else 1.0
        np.testing.assert_array_equal(found.read(name), wanted.read(name) / divisor, name)
    stored = found.grouped("model.norm.weight").rows.view(np.float32)[0]
    np.testing.assert_array_equal(stored, found.read("model.norm.weight"))


def test_the_context_of_ministral_ends_where_queries_begin_to_grow(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, MINISTRAL)
    assert load(folder).max_model_len == 128
    with pytest.raises(ConfigError, match="129: wanted at most 128, the model's longest context"):
        load(folder, max_model_len=129)


def test_ministral_says_how_its_positions_are_scaled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rope_parameters is missing: wanted an object"):
        _spec(tmp_path, {k: v for k, v in MINISTRAL.items() if k != "rope_parameters"})


def test_mixtral_has_a_window_in_every_layer_if_it_has_one(tmp_path: Path) -> None:
    assert _spec(tmp_path, CONFIGS["mixtral"]).windows == ()
    assert _spec(tmp_path, CONFIGS["mixtral"] | {"sliding_window": 37}).windows == (37, 37)


def test_fp8_with_a_scale_for_a_tensor_and_one_for_its_inputs(tmp_path: Path) -> None:
    """As the files of Ministral 3 have it; scales of activations are not read."""
    packer = Fp8(0, 0, scale_dtype="BF16", shape_of_scales=lambda _: ())
    tensors, values = packed_model(weights_of(MINISTRAL | {"num_hidden_layers": 1}), packer)
    stored: dict[str, Tensor] = {}
    for name, one in tensors.items():
        stored[f"language_model.{name}"] = one
        if name.endswith("weight_scale_inv"):
            scale = floats("BF16", np.ones((), np.float32))
            stored[f"language_model.{name.replace('weight_scale_inv', 'activation_scale')}"] = scale
    write_tensors(tmp_path / "model.safetensors", stored)
    quantization = packer.config() | {"activation_scheme": "static", "dequantize": False}
    text = {k: v for k, v in MINISTRAL.items() if k != "architectures"} | {"num_hidden_layers": 1}
    spec = _spec(tmp_path, {"text_config": text, "quantization_config": quantization})
    checkpoint = Checkpoint(tmp_path, spec)
    assert sorted(checkpoint.names()) == sorted(values)
    for name, wanted in values.items():
        np.testing.assert_array_equal(checkpoint.read(name), wanted, name)
