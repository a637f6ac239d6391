"""A folder of quantised weights that is broken is refused before they are read, in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
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
    packed_model,
    write_tensors,
)
from tests.support.models.tiny_checkpoints import CONFIGS, weights_of

CONFIG = CONFIGS["llama"] | {"num_hidden_layers": 1}
UP = "model.layers.0.mlp.up_proj"
"""96 outputs and 64 inputs."""
Tensors = dict[str, Tensor]
GROUPS = Gptq(group_size=32)
ORDERED = Gptq(group_size=32, is_ordered=False)
PACKED = PackQuantized(group_size=32)
ZEROS = PackQuantized(group_size=32, is_symmetric=False)


def _write(
    folder: Path, packer: Packer, change: Callable[[Tensors], object] = lambda _: None, **keys: Any
) -> None:
    tensors, _ = packed_model(weights_of(CONFIG), packer)
    change(tensors)
    described = {**CONFIG, "quantization_config": packer.config() | keys}
    (folder / "config.json").write_text(json.dumps(described))
    write_tensors(folder / "model.safetensors", tensors)


def _refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder, read_decoder_spec(folder))
    for word in words:
        assert word in str(caught.value)


def _without(suffix: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{UP}.{suffix}")


def _with(suffix: str, **fields: Any) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        name = f"{UP}.{suffix}"
        tensors[name] = replace(tensors[name], **fields)

    return change


@pytest.mark.parametrize(
    ("packer", "suffix", "words"),
    [
        (GROUPS, "qweight", (f"{UP}.qweight or {UP}.weight", "[96, 64]")),
        (GROUPS, "scales", (f"{UP}.scales", "[2, 96]")),
        (GROUPS, "qzeros", (f"{UP}.qzeros", "[2, 12]")),
        (ORDERED, "g_idx", (f"{UP}.g_idx", "[64]")),
        (Awq(32), "qweight", (f"{UP}.qweight or {UP}.weight", "[96, 64]")),
        (Awq(32), "scales", (f"{UP}.scales", "[2, 96]")),
        (Awq(32), "qzeros", (f"{UP}.qzeros", "[2, 12]")),
        (Fp8(32, 32), "weight", (f"{UP}.weight", "[96, 64]")),
        (Fp8(32, 32), "weight_scale_inv", (f"{UP}.weight_scale_inv", "[3, 2]")),
        (PACKERS["fp8, one scale"], "weight_scale", (f"{UP}.weight_scale", "[1]")),
        (PACKED, "weight_packed", (f"{UP}.weight_packed", "[96, 64]")),
        (PACKED, "weight_scale", (f"{UP}.weight_scale", "[96, 2]")),
        (PACKED, "weight_shape", (f"{UP}.weight_shape", "[2]")),
        (ZEROS, "weight_zero_point", (f"{UP}.weight_zero_point", "[12, 2]")),
        (PACKERS["float-quantized, channels"], "weight_scale", (f"{UP}.weight_scale", "[96, 1]")),
        (PACKERS["int-quantized"], "weight_scale", (f"{UP}.weight_scale", "[96, 1]")),
    ],
)
def test_a_missing_tensor(
    tmp_path: Path, packer: Packer, suffix: str, words: tuple[str, ...]
) -> None:
    _write(tmp_path, packer, _without(suffix))
    _refused(tmp_path, "is missing", *words)


@pytest.mark.parametrize(
    ("packer", "suffix", "fields", "words"),
    [
        (GROUPS, "qweight", {"shape": (16, 48)}, ("qweight", "[16, 48]", "[8, 96]")),
        (GROUPS, "qweight", {"shape": (768,)}, ("qweight", "[768]", "[8, 96]")),
        (GROUPS, "scales", {"shape": (96, 2)}, ("scales", "[96, 2]", "[2, 96]")),
        (GROUPS, "qzeros", {"dtype": "F32"}, ("qzeros is F32", "wanted I32")),
        (Awq(32), "qweight", {"shape": (8, 96)}, ("qweight", "[8, 96]", "[64, 12]")),
        (Awq(32), "scales", {"shape": (192,)}, ("scales", "[192]", "[2, 96]")),
        (Fp8(32, 32), "weight_scale_inv", {"shape": (6,)}, ("weight_scale_inv", "[6]", "[3, 2]")),
        (Fp8(32, 32), "weight", {"shape": (64, 96)}, ("weight", "[64, 96]", "[96, 64]")),
        (PACKED, "weight_packed", {"shape": (8, 96)}, ("[8, 96]", "[96, 8]")),
        (PACKED, "weight_shape", {"numbers": (96, 63)}, ("weight_shape", "[96, 63]", "[96, 64]")),
        (ZEROS, "weight_zero_point", {"shape": (2, 12)}, ("zero_point", "[2, 12]", "[12, 2]")),
        (
            PACKERS["int-quantized"], "weight_scale", {"shape": (96,)},
            ("weight_scale", "[96]", "[96, 1]"),
        ),
    ],
)  # fmt: skip
def test_a_tensor_of_another_form(
    tmp_path: Path, packer: Packer, suffix: str, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    _write(tmp_path, packer, _with(suffix, **fields))
    _refused(tmp_path, "model.safetensors", UP, *words)


@pytest.mark.parametrize(
    ("packer", "numbers", "words"),
    [
        (ORDERED, [0, 2] * 32, ("0 to 2", "wanted 0 to 1")),
        (ORDERED, [-1, 1] * 32, ("-1 to 1", "wanted 0 to 1")),
        (GROUPS, [0, 1] * 32, ("in no order", "desc_act is false")),
    ],
)
def test_groups_that_are_none(
    tmp_path: Path, packer: Packer, numbers: list[int], words: tuple[str, ...]
) -> None:
    _write(tmp_path, packer, _with("g_idx", numbers=numbers))
    _refused(tmp_path, "model.safetensors", f"{UP}.g_idx", *words)


def test_groups_of_compressed_tensors_that_are_none(tmp_path: Path) -> None:
    packer = PackQuantized(group_size=32, is_ordered=False)
    _write(tmp_path, packer, _with("weight_g_idx", numbers=[0, 2] * 32))
    _refused(tmp_path, f"{UP}.weight_g_idx", "0 to 2", "wanted 0 to 1")


@pytest.mark.parametrize(
    ("packer", "keys", "words"),
    [
        (GROUPS, {"quant_method": "bitsandbytes"}, ("quant_method", "bitsandbytes", "gptq, awq")),
        (GROUPS, {"quant_method": None}, ("quant_method", "gptq, awq, fp8, compressed-tensors")),
        (GROUPS, {"quant_method": ["gptq"]}, ("quant_method", "gptq, awq")),
        (GROUPS, {"bits": 3}, ("quantization_config.bits is 3", "wanted 4 or 8")),
        (GROUPS, {"bits": None}, ("quantization_config.bits", "whole number")),
        (GROUPS, {"group_size": 0}, ("quantization_config.group_size is 0", "at least 1")),
        (GROUPS, {"group_size": -2}, ("quantization_config.group_size is -2", "at least 1")),
        (GROUPS, {"group_size": 48}, (".qweight", "group_size is 48", "divisor", "64 inputs")),
        (GROUPS, {"desc_act": "no"}, ("desc_act", "true or false")),
        (GROUPS, {"checkpoint_format": "marlin"}, ("checkpoint_format", "gptq or gptq_v2")),
        (GROUPS, {"is_marlin_format": True}, ("is_marlin_format", "false")),
        (GROUPS, {"pack_dtype": "int16"}, ("pack_dtype", "int32")),
        (GROUPS, {"dynamic": {"+:.*up.*": {"bits": 8}}}, ("dynamic", "same bits")),
        (GROUPS, {"dynamic": [1]}, ("dynamic", "same bits")),
        (Awq(32), {"bits": 8}, ("quantization_config.bits is 8", "wanted 4")),
        (Awq(32), {"version": "gemv"}, ("version", "gemv", "gemm")),
        (Awq(32), {"backend": "llm-awq"}, ("backend", "llm-awq", "autoawq")),
        (Awq(32), {"zero_point": False}, ("zero_point", "true")),
        (Awq(32), {"group_size": 40}, (".qweight", "group_size is 40", "divisor", "64 inputs")),
        (Fp8(32, 32), {"fmt": "e5m2"}, ("fmt", "e5m2", "e4m3")),
        (Fp8(32, 32), {"weight_block_size": [32]}, ("weight_block_size", "two whole numbers")),
        (Fp8(32, 32), {"weight_block_size": [32, 0]}, ("weight_block_size", "two whole numbers")),
        (Fp8(32, 32), {"weight_block_size": None}, ("weight_scale_inv", "[2, 2]", "[1]")),
        (Fp8(32, 32), {"weight_block_size": [64, 64]}, ("weight_scale_inv", "[2, 2]", "[1, 1]")),
        (PACKED, {"format": "nvfp4-pack-quantized"}, ("format", "nvfp4", "pack-quantized")),
        (PACKED, {"format": "float-quantized"}, ("weights.type is 'int'", "float-quantized")),
        (PACKED, {"format": "int-quantized"}, ("q_proj.weight is missing", "[64, 64]")),
        (PACKED, {"config_groups": {}}, ("config_groups", "groups of layers")),
        (PACKED, {"config_groups": {"a": {"targets": "Linear"}}}, ("a.targets", "list of names")),
        (PACKED, {"config_groups": {"a": {"targets": ["Linear"]}}}, ("a.weights", "object")),
        (PACKED, {"ignore": ["re:("]}, ("ignore", "regular expressions")),
        (PACKED, {"ignore": [UP]}, (f"{UP}.weight_packed", "no group", "in F32 or F16 or BF16")),
        (PACKED, {"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparsity_config",)),
        (PACKED, {"transform_config": {"config_groups": {"R1": {}}}}, ("transform_config",)),
    ],
)
def test_a_config_that_is_not_read(
    tmp_path: Path, packer: Packer, keys: dict[str, Any], words: tuple[str, ...]
) -> None:
    _write(tmp_path, packer, **keys)
    _refused(tmp_path, *words)


def _of_weights(**fields: Any) -> dict[str, Any]:
    groups = PACKED.config()["config_groups"]
    groups["group_0"]["weights"] |= fields
    return {"config_groups": groups}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_bits": 3}, ("group_0.weights.num_bits is 3", "4 or 8")),
        ({"strategy": "token"}, ("weights.strategy", "group or channel")),
        ({"group_size": 48}, (".weight_packed", "group_size is 48", "64 inputs")),
        ({"type": "posit"}, ("weights.type", "int or float")),
        ({"symmetric": 1}, ("weights.symmetric", "true or false")),
        ({"symmetric": False}, ("q_proj.weight_zero_point", "missing", "[8, 2]")),
    ],
)
def test_weights_of_a_group_that_are_not_read(
    tmp_path: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    _write(tmp_path, PACKED, **_of_weights(**fields))
    _refused(tmp_path, *words)


def test_a_layer_in_the_form_of_another_group(tmp_path: Path) -> None:
    groups = PACKED.config()["config_groups"]
    floats = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups["up"] = {"targets": ["re:.*up_proj"], "format": "float-quantized", "weights": floats}
    _write(tmp_path, PACKED, config_groups=groups)
    _refused(tmp_path, f"{UP}.weight_packed is I32", "another form", f"wanted {UP}.weight")


def test_quantised_tensors_without_a_config_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, Fp8(32, 32))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _refused(tmp_path, "F8_E4M3", "wanted F32, F16 or BF16")


def test_a_weight_that_is_there_twice(tmp_path: Path) -> None:
    plain = Tensor("F32", (96, 64), [0.0] * 96 * 64)
    _write(tmp_path, GROUPS, lambda tensors: tensors.update({f"{UP}.weight": plain}))
    _refused(tmp_path, f"{UP}.weight is there beside {UP}.qweight", "wanted one")


def test_a_layer_of_a_group_that_is_stored_plainly(tmp_path: Path) -> None:
    """It may be meant to be rounded: nothing says how."""
    plain = Tensor("F32", (96, 64), [0.0] * 96 * 64)
    packer = PACKERS["float-quantized, channels"]
    _write(tmp_path, packer, lambda tensors: tensors.update({f"{UP}.weight": plain}))
    _refused(tmp_path, f"{UP}.weight is F32", "wanted F8_E4M3")


def test_outputs_that_fill_no_word(tmp_path: Path) -> None:
    config = CONFIG | {"intermediate_size": 100}
    tensors, _ = packed_model(weights_of(CONFIG), GROUPS)
    described = {**config, "quantization_config": GROUPS.config()}
    (tmp_path / "config.json").write_text(json.dumps(described))
    write_tensors(tmp_path / "model.safetensors", tensors)
    _refused(tmp_path, "gate_proj.qweight", "100 outputs", "a multiple of 8")


@pytest.mark.parametrize("packer", [GROUPS, Awq(32), Fp8(32, 32), PACKED])
def test_a_truncated_file(tmp_path: Path, packer: Packer) -> None:
    _write(tmp_path, packer)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    _refused(tmp_path, "model.safetensors", "truncated")
