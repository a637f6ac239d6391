"""Which layers of a folder are quantised, and how: each by its config.json and its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.step.step_batch import batch_of
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.support.models.hub_formats import (
    PACKERS,
    Awq,
    Fp8,
    Gptq,
    Packer,
    PackQuantized,
    Tensor,
    floats,
    is_quantised,
    write_tensors,
)
from tests.support.models.mtp_running import load_with_mtp, only, step
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    mtp_weights_of,
    prompt_of,
    weights_of,
)

CONFIG = CONFIGS["llama"] | {"num_hidden_layers": 1}
CHANNELS = PACKERS["float-quantized, channels"]
INTEGERS = PACKERS["int-quantized"]
PACKED = PackQuantized(group_size=32)
UP = "model.layers.0.mlp.up_proj.weight"


def _write(
    folder: Path,
    packers: Mapping[str, Packer | None],
    quantization: dict[str, Any],
    weights: dict[str, np.ndarray] | None = None,
    config: dict[str, Any] = CONFIG,
) -> dict[str, np.ndarray]:
    """Pack each linear layer as the first part of its name in `packers` says; None: not at all."""
    tensors: dict[str, Tensor] = {}
    values = {}
    for seed, (name, weight) in enumerate((weights or weights_of(config)).items()):
        packer = next((one for part, one in packers.items() if part in name), None)
        if packer is None or not is_quantised(name, weight):
            tensors[name], values[name] = floats("F32", weight), weight
            continue
        parts, values[name] = packer.pack(weight, seed)
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in parts.items()}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    write_tensors(folder / "model.safetensors", tensors)
    return values


def _check(folder: Path, values: Mapping[str, np.ndarray]) -> None:
    checkpoint = Checkpoint(folder, read_decoder_spec(folder))
    for name, wanted in values.items():
        np.testing.assert_array_equal(checkpoint.read(name), wanted, name)


@pytest.mark.parametrize("packer", [Gptq(group_size=32), Awq(32), Fp8(32, 32)])
def test_layers_that_were_left_alone_are_as_they_are_stored(tmp_path: Path, packer: Packer) -> None:
    left = {"modules_to_not_convert": ["model.layers.0.self_attn.o_proj", "down_proj"]}
    packers = {"o_proj": None, "down_proj": None, "": packer}
    _check(tmp_path, _write(tmp_path, packers, packer.config() | left))


def test_rules_of_gptqmodel_may_leave_layers_alone(tmp_path: Path) -> None:
    packer = Gptq(group_size=32)
    config = packer.config() | {"dynamic": {"-:.*down_proj": {}}}
    _check(tmp_path, _write(tmp_path, {"down_proj": None, "": packer}, config))


@pytest.mark.parametrize("ignored", ["model.layers.0.mlp.down_proj", "re:.*down_proj"])
def test_ignored_layers_of_compressed_tensors(tmp_path: Path, ignored: str) -> None:
    config = PACKED.config() | {"ignore": ["lm_head", ignored]}
    _check(tmp_path, _write(tmp_path, {"down_proj": None, "": PACKED}, config))


def _group(packer: Packer, targets: list[str], **more: Any) -> dict[str, Any]:
    config = packer.config()
    (group,) = config["config_groups"].values()
    return {**group, "targets": targets, "format": config["format"], **more}


def test_groups_have_forms_of_their_own_and_names_precede_classes(tmp_path: Path) -> None:
    config = PACKED.config() | {
        "format": "mixed-precision",
        "config_groups": {
            "all": _group(PACKED, ["Linear"]),
            "attention": _group(CHANNELS, ["re:.*self_attn.*"]),
            "down": _group(INTEGERS, ["model.layers.0.mlp.down_proj"], format="naive-quantized"),
        },
    }
    packers = {"self_attn": CHANNELS, "down_proj": INTEGERS, "": PACKED}
    _check(tmp_path, _write(tmp_path, packers, config))


def test_activations_and_keys_that_the_file_would_round_are_not_rounded(tmp_path: Path) -> None:
    """Neither their settings nor their scales change a weight."""
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = CHANNELS.config() | {"kv_cache_scheme": activations}
    config["config_groups"]["group_0"]["input_activations"] = activations
    weights = weights_of(CONFIG)
    scale = np.ones(1, np.float32)
    for layer in ("self_attn.q_proj", "mlp.up_proj"):
        weights[f"model.layers.0.{layer}.input_scale"] = scale
    weights["model.layers.0.self_attn.k_scale"] = scale
    values = _write(tmp_path, {"": CHANNELS}, config, weights)
    _check(tmp_path, {name: one for name, one in values.items() if not name.endswith("_scale")})


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_rows_and_columns_whose_last_word_is_filled_up(tmp_path: Path, is_symmetric: bool) -> None:
    """68 inputs and 100 outputs are no whole words of eight integers (compressed-tensors)."""
    config = CONFIG | {"hidden_size": 68, "intermediate_size": 100, "head_dim": 18}
    packer = PackQuantized(group_size=-1, is_symmetric=is_symmetric)
    _check(tmp_path, _write(tmp_path, {"": packer}, packer.config(), config=config))


def test_names_of_versions_in_capitals(tmp_path: Path) -> None:
    packer = Awq(32)
    _check(tmp_path, _write(tmp_path, {"": packer}, packer.config() | {"version": "GEMM"}))


def test_the_version_under_its_newer_name(tmp_path: Path) -> None:
    packer = Gptq(group_size=32, is_symmetric=False, version="gptq_v2")
    config = packer.config()
    config["format"] = config.pop("checkpoint_format")
    _check(tmp_path, _write(tmp_path, {"": packer}, config))


@pytest.mark.parametrize(
    ("shape", "packer"),
    [((), Fp8(0, 0)), ((1, 1), Fp8(0, 0)), ((96,), Fp8(1, 0)), ((96, 1), Fp8(1, 0))],
)
def test_scales_of_tensors_and_of_outputs(
    tmp_path: Path, shape: tuple[int, ...], packer: Fp8
) -> None:
    weights = {"model.layers.0.mlp.up_proj.weight": weights_of(CONFIG)[UP]}
    values = _write(tmp_path, {"": packer}, packer.config(), weights)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["quantization_config"]["weight_block_size"] is None
    parts, _ = packer.pack(weights[UP], 0)
    name = f"{UP.removesuffix('.weight')}.weight_scale_inv"
    scales = Tensor("F32", shape, parts["weight_scale_inv"].numbers)
    tensors = {UP: parts["weight"], name: scales}
    others = {k: floats("F32", v) for k, v in weights_of(CONFIG).items() if k != UP}
    write_tensors(tmp_path / "model.safetensors", others | tensors)
    _check(tmp_path, values)


def test_parts_of_a_weight_may_be_in_other_files(tmp_path: Path) -> None:
    packer = Gptq(group_size=32)
    values = _write(tmp_path, {"": packer}, packer.config())
    tensors: dict[str, Tensor] = {}
    for seed, (name, weight) in enumerate(weights_of(CONFIG).items()):
        if not is_quantised(name, weight):
            tensors[name] = floats("F32", weight)
            continue
        parts, _ = packer.pack(weight, seed)
        tensors |= {f"{name.removesuffix('.weight')}.{end}": one for end, one in parts.items()}
    (tmp_path / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for shard in range(2):
        part = {name: tensors[name] for name in list(tensors)[shard::2]}
        write_tensors(tmp_path / f"{shard}.safetensors", part)
        weight_map |= dict.fromkeys(part, f"{shard}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    _check(tmp_path, values)


def test_a_drafting_layer_may_be_quantised_too(tmp_path: Path) -> None:
    """It drafts as the layer of its values does."""
    config = CONFIGS["llama"]
    weights = weights_of(config) | mtp_weights_of(config, "deepseek")
    packer = Fp8(32, 32)
    packed, wide = tmp_path / "packed", tmp_path / "wide"
    packed.mkdir()
    wide.mkdir()
    values = _write(packed, {"": packer}, packer.config(), weights, config)
    (wide / "config.json").write_text(json.dumps(config))
    write_tensors(wide / "model.safetensors", {n: floats("F32", v) for n, v in values.items()})
    drawn = []
    for folder in (packed, wide):
        _check(folder, values)
        runner = load_with_mtp(folder)
        drawn.append(
            only(runner.execute(batch_of([step(prompt_of(12), 0, range(9), num_proposals=3)])))
        )
    assert len(drawn[0].draft_token_ids) == 3
    assert drawn[0] == drawn[1]
