"""Files with several projections in one tensor, plain, in GGUF groups and in forms of hubs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.derived.fused_weights import fused_projections, fused_shapes
from engine.runner.weights.spec.decoder_tensors import expected_shapes
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.stored_formats import dequantise
from tests.support.models.hub_formats import PACKERS, pack_folder
from tests.support.models.tiny_checkpoints import CONFIGS, weights_of, write_checkpoint
from tests.support.models.tiny_gguf import FORMATS, write_pair

CONFIG = CONFIGS["phi3"] | {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1}
"""Heads of 64: query, key and value have 256, 128 and 128 rows, gate and up 384 each."""
QKV, GATE_UP = (f"model.layers.0.{n}.weight" for n in ("self_attn.qkv_proj", "mlp.gate_up_proj"))
PARTS = {
    "self_attn.q_proj": (QKV, slice(0, 256)),
    "self_attn.k_proj": (QKV, slice(256, 384)),
    "self_attn.v_proj": (QKV, slice(384, 512)),
    "mlp.gate_proj": (GATE_UP, slice(0, 384)),
    "mlp.up_proj": (GATE_UP, slice(384, 768)),
}
PACKED = ("gptq", "gptq, desc_act", "awq", "fp8", "pack-quantized, any zeros")


def _open(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_decoder_spec(folder))


def _check_parts(checkpoint: Checkpoint, values: dict[str, np.ndarray]) -> None:
    for name, (fused, rows) in PARTS.items():
        weight, wanted = f"model.layers.0.{name}.weight", values[fused][rows]
        assert checkpoint.shape(weight) == wanted.shape
        np.testing.assert_array_equal(checkpoint.read(weight), wanted, weight)
        stored = checkpoint.grouped(weight)
        assert (stored.format, stored.shape) == checkpoint.format_and_shape(weight)
        np.testing.assert_array_equal(dequantise(stored), wanted, weight)
    down = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(checkpoint.read(down), values[down])


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_each_projection_is_a_tensor_of_its_own(tmp_path: Path, dtype: str) -> None:
    folder = write_checkpoint(tmp_path, CONFIG, dtype=dtype)
    values = weights_of(CONFIG)
    if dtype == "BF16":
        values = {
            name: (one.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            for name, one in values.items()
        }
    checkpoint = _open(folder)
    _check_parts(checkpoint, values)
    assert sorted(checkpoint.names()) == sorted(expected_shapes(read_decoder_spec(folder)))


def test_groups_of_a_gguf_file_are_divided_by_rows(tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, CONFIG, FORMATS | {"qkv_proj": "Q4_1", "gate_up_proj": "Q8_0"})
    checkpoint = _open(stored)
    values = {name: checkpoint.read(name) for name in checkpoint.names()}
    fused = {
        QKV: np.concatenate([values[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv"]),
        GATE_UP: np.concatenate(
            [values[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up")]
        ),
    }
    _check_parts(checkpoint, values | fused)
    assert checkpoint.format_and_shape("model.layers.0.self_attn.k_proj.weight")[0] == "Q4_1"


@pytest.mark.parametrize("packer", PACKED)
def test_what_is_quantised_already_is_divided_too(tmp_path: Path, packer: str) -> None:
    values = pack_folder(tmp_path, CONFIG, weights_of(CONFIG), PACKERS[packer])
    _check_parts(_open(tmp_path), values)


def test_tiles_of_fp8_are_divided_where_a_projection_has_whole_ones(tmp_path: Path) -> None:
    values = pack_folder(tmp_path, CONFIG, weights_of(CONFIG), PACKERS["fp8"])
    checkpoint = _open(tmp_path)
    for name, (fused, rows) in PARTS.items():
        weight = f"model.layers.0.{name}.weight"
        assert checkpoint.has_float8(weight)
        tensor = checkpoint.float8(weight)
        assert tensor.numbers.shape == values[fused][rows].shape
        scales = np.repeat(np.repeat(tensor.scales, 128, axis=0), 128, axis=1)
        exact = np.array([_e4m3(byte) for byte in range(256)])[tensor.numbers]
        np.testing.assert_array_equal((exact * scales).astype(np.float32), values[fused][rows])


def _e4m3(byte: int) -> float:
    sign, exponent, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def test_a_projection_that_ends_within_a_tile_has_no_fp8(tmp_path: Path) -> None:
    config = CONFIG | {"num_key_value_heads": 1}  # keys are rows 256 to 320, values from there on
    pack_folder(tmp_path, config, weights_of(config), PACKERS["fp8"])
    checkpoint = _open(tmp_path)
    has = {n: checkpoint.has_float8(f"model.layers.0.self_attn.{n}_proj.weight") for n in "qkv"}
    assert has == {"q": True, "k": False, "v": False}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": 256}, ("mlp.gate_up_proj.weight", "[768, 256]", "[512, 256]")),
        ({"num_key_value_heads": 4}, ("self_attn.qkv_proj.weight", "[512, 256]", "[768, 256]")),
    ],
)
def test_the_fused_tensor_is_named_where_it_is_wrong(
    tmp_path: Path, change: dict[str, int], words: tuple[str, ...]
) -> None:
    folder = write_checkpoint(tmp_path, CONFIG)
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(CheckpointError) as raised:
        _open(folder)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_shapes_of_fused_tensors_are_sums_of_their_rows() -> None:
    shapes = {
        "a.self_attn.q_proj.weight": (6, 4),
        "a.self_attn.k_proj.weight": (2, 4),
        "a.self_attn.v_proj.weight": (2, 4),
        "a.mlp.up_proj.weight": (3, 4),
        "norm.weight": (4,),
    }
    assert fused_shapes(shapes, {}) == shapes
    assert fused_shapes(shapes, fused_projections("Phi3ForCausalLM")) == {
        "a.self_attn.qkv_proj.weight": (10, 4),
        "a.mlp.gate_up_proj.weight": (3, 4),
        "norm.weight": (4,),
    }
