"""GGUF files of mixtures of experts: each expert is a part of a tensor of three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.gguf_file import GgufFile
from engine.runner.weights.spec.model_spec import read_decoder_spec
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, weights_of
from tests.support.models.tiny_gguf import (
    FORMATS,
    K_MIXTURE,
    MIXTURES,
    write_gguf,
    write_pair,
)

Q4_K_M = {
    "embed_tokens": "Q4_K", "q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K",
    "o_proj": "Q4_K", "gate_proj": "Q4_K", "up_proj": "Q4_K", "down_proj": "Q6_K",
    "lm_head": "Q6_K",
}  # fmt: skip
"""The formats of a file that llama.cpp calls Q4_K_M; the gate of the experts stays F32."""
FAMILIES = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
MXFP4 = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "MXFP4")
"""The formats of gpt-oss's experts."""
EXPERTS = "blk.1.ffn_down_exps.weight"


@pytest.fixture(params=[*MIXTURES, "Q4_K_M"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    if request.param == "Q4_K_M":
        return write_pair(tmp_path, K_MIXTURE, Q4_K_M)
    if request.param == "gpt_oss":
        return write_pair(tmp_path, CONFIGS[request.param], FORMATS | MXFP4)
    return write_pair(tmp_path, CONFIGS[request.param], FORMATS | {"down_proj": "F16"})


def _opened(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_decoder_spec(folder))


def _made(tmp_path: Path, name: str = "qwen3_moe", **metadata: Any) -> Path:
    """The folder of a file in F32; `metadata` replaces keys of its architecture."""
    family = FAMILIES.get(name, "ernie4_5-moe")
    changed = {f"{family}.{key}": value for key, value in metadata.items()}
    write_gguf(tmp_path / "model.gguf", CONFIGS[name], {}, changed)
    folder = tmp_path / "made"
    folder.mkdir()
    make_gguf_folder(tmp_path / "model.gguf", folder)
    return folder


def test_the_decoder_and_every_value_are_those_of_the_folder(pair: tuple[Path, Path]) -> None:
    stored, wide = (read_decoder_spec(folder) for folder in pair)
    assert stored == wide
    assert stored.experts is not None
    files, values = (_opened(folder) for folder in pair)
    assert set(files.names()) == set(values.names())
    assert files.identity() == values.identity()
    for name in values.names():
        assert files.shape(name) == values.shape(name)
        found = files.grouped(name)
        assert (found.format, found.shape) == files.format_and_shape(name)
        np.testing.assert_array_equal(files.read(name), values.read(name), name)


def test_stored_and_wide_weights_give_the_same_bits(pair: tuple[Path, Path]) -> None:
    stored, wide = (load(folder, attention_backend="paddle") for folder in pair)
    prompt = prompt_of(33)
    found = logits_of(stored, scheduled(prompt, 0, range(10)))
    np.testing.assert_array_equal(found, logits_of(wide, scheduled(prompt, 0, range(10))))


def test_an_expert_is_a_part_of_the_mapped_file_and_not_a_copy(pair: tuple[Path, Path]) -> None:
    checkpoint = _opened(pair[0])
    rows = [
        checkpoint.grouped(f"model.layers.1.mlp.experts.{index}.down_proj.weight").rows
        for index in range(8)
    ]
    for index, one in enumerate(rows):
        assert one.flags.c_contiguous
        assert not one.flags.writeable
        assert not one.flags.owndata
        assert one.ctypes.data == rows[0].ctypes.data + index * rows[0].nbytes


@pytest.mark.covers("K24")
@pytest.mark.parametrize("is_a_row", [True, False])
def test_the_bias_of_the_choice_may_have_one_dimension_or_two(
    tmp_path: Path, is_a_row: bool
) -> None:
    """Versions of the converter differ in it."""
    config = CONFIGS["ernie_moe"]
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"

    def changed(tensors: dict[str, np.ndarray]) -> None:
        bias = tensors["blk.1.exp_probs_b.bias"]
        tensors["blk.1.exp_probs_b.bias"] = bias if is_a_row else bias.reshape(-1)

    values = _rewritten(tmp_path / "model.gguf", config, changed)
    folder = tmp_path / "made"
    folder.mkdir()
    make_gguf_folder(tmp_path / "model.gguf", folder)
    checkpoint = _opened(folder)
    assert checkpoint.shape(name) == (1, 8)
    np.testing.assert_array_equal(checkpoint.read(name), values[name])


def _rewritten(
    path: Path,
    config: Mapping[str, Any],
    change: Callable[[dict[str, np.ndarray]], object],
) -> dict[str, np.ndarray]:
    """Write a model's file in F32 with tensors that `change` has changed; return its values."""
    values = write_gguf(path, config, {})
    file = GgufFile(path)
    tensors = {name: one.dequantised() for name, one in file.tensors.items()}
    change(tensors)
    writer = gguf.GGUFWriter(path, file.text("general.architecture"))
    for key, value in file.metadata.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, one in tensors.items():
        writer.add_tensor(name, one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _without_an_expert(tensors: dict[str, np.ndarray]) -> None:
    tensors[EXPERTS] = tensors[EXPERTS][:-1]


def _turned(tensors: dict[str, np.ndarray]) -> None:
    tensors[EXPERTS] = np.ascontiguousarray(tensors[EXPERTS].swapaxes(1, 2))


def _flat(tensors: dict[str, np.ndarray]) -> None:
    tensors[EXPERTS] = tensors[EXPERTS].reshape(-1, tensors[EXPERTS].shape[-1])


def _fused(tensors: dict[str, np.ndarray]) -> None:
    parts = [tensors.pop(f"blk.1.ffn_{part}_exps.weight") for part in ("gate", "up")]
    tensors["blk.1.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)


@pytest.mark.covers("K27")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_an_expert, rf"tensor {EXPERTS} has shape \[7, 64, 32\]: wanted \[8, 64, 32\]"),
        (_turned, rf"tensor {EXPERTS} has shape \[8, 32, 64\]: wanted \[8, 64, 32\]"),
        (_flat, rf"tensor {EXPERTS} has shape \[512, 32\]: wanted \[8, 64, 32\]"),
        (
            lambda tensors: tensors.pop(EXPERTS),
            rf"tensor {EXPERTS} is missing: wanted shape \[8, 64, 32\]",
        ),
        (
            lambda tensors: tensors.pop("blk.0.ffn_gate_inp.weight"),
            r"tensor blk\.0\.ffn_gate_inp\.weight is missing: wanted shape \[8, 64\]",
        ),
        (_fused, r"tensor blk\.1\.ffn_gate_up_exps\.weight is not part of the decoder"),
        (
            lambda tensors: tensors.update({"blk.0.exp_probs_b.bias": np.ones(8, np.float32)}),
            r"tensor blk\.0\.exp_probs_b\.bias is not part of the decoder",
        ),
    ],
)
def test_a_tensor_that_is_not_of_the_mixture_is_named_as_the_file_does(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], object], said: str
) -> None:
    path = tmp_path / "model.gguf"
    _rewritten(path, CONFIGS["qwen3_moe"], change)
    folder = tmp_path / "made"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=said):
        make_gguf_folder(path, folder)


@pytest.mark.covers("K24")
def test_a_bias_of_the_choice_that_is_missing_is_an_error_and_not_zero(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    name = "blk.1.exp_probs_b.bias"
    _rewritten(path, CONFIGS["ernie_moe"], lambda tensors: tensors.pop(name))
    (tmp_path / "made").mkdir()
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing"):
        make_gguf_folder(path, tmp_path / "made")


@pytest.mark.covers("K23")
@pytest.mark.parametrize(("said", "wanted"), [({}, True), ({"expert_weights_norm": False}, False)])
def test_weights_are_normalised_unless_the_file_says_otherwise(
    tmp_path: Path, said: dict[str, Any], wanted: bool
) -> None:
    experts = read_decoder_spec(_made(tmp_path, **said)).experts
    assert experts is not None
    assert experts.is_normalised is wanted


def test_an_inner_size_that_is_left_out_is_that_of_llama_cpp(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"]
    path = tmp_path / "model.gguf"
    write_gguf(path, config, {}, {"qwen3moe.expert_feed_forward_length": None})
    folder = tmp_path / "made"
    folder.mkdir()
    make_gguf_folder(path, folder)
    experts = read_decoder_spec(folder).experts
    assert experts is not None
    assert experts.inner_size == config["intermediate_size"] // config["num_experts_per_tok"]


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("qwen3_moe", "expert_count", 0, "is 0: wanted a whole number from 1 to 65536"),
        ("qwen3_moe", "expert_count", 1 << 20, "is 1048576: wanted a whole number"),
        ("qwen3_moe", "expert_count", True, "is True: wanted an integer"),
        ("qwen3_moe", "expert_count", 8.0, "is 8.0: wanted an integer"),
        ("qwen3_moe", "expert_used_count", 9, "is 9: wanted at most 8, expert_count"),
        ("qwen3_moe", "expert_used_count", 0, "is 0: wanted a whole number"),
        ("qwen3_moe", "expert_feed_forward_length", 0, "is 0: wanted a whole number"),
        ("qwen3_moe", "expert_weights_norm", 1, "is 1: wanted a boolean"),
        ("qwen3_moe", "expert_weights_scale", 2.5, "is 2.5: wanted 1"),
        ("qwen3_moe", "expert_gating_func", 2, "is 2: wanted 1, softmax"),
        ("qwen3_moe", "expert_group_count", 4, "is 4: wanted experts without groups"),
        ("gpt_oss", "expert_gating_func", 2, "is 2: wanted 3, softmax of the chosen"),
        ("gpt_oss", "expert_count", 0, "is 0: wanted a whole number"),
        ("gpt_oss", "attention.sliding_window", 0, "is 0: wanted a sliding window of at least"),
        ("gpt_oss", "attention.sliding_window_pattern", 0, "is 0: wanted at least 1"),
        ("gpt_oss", "rope.freq_base_swa", 10000.0, "is 10000.0: wanted the base of all layers"),
        ("ernie_moe", "expert_weights_norm", False, "is False: wanted true"),
        ("ernie_moe", "leading_dense_block_count", -1, "is -1: wanted a whole number from 0"),
        ("ernie_moe", "interleave_moe_layer_step", 0, "is 0: wanted a whole number from 1"),
        (
            "ernie_moe",
            "expert_shared_count",
            1 << 30,
            "is 1073741824: wanted a whole",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_with_their_key(
    tmp_path: Path, name: str, key: str, value: Any, said: str
) -> None:
    family = FAMILIES.get(name, "ernie4_5-moe")
    with pytest.raises(CheckpointError, match=rf"metadata key {family}\.{key} {said}"):
        _made(tmp_path, name, **{key: value})


def test_experts_of_an_architecture_without_them_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, CONFIGS["qwen3"], {}, {"qwen3.expert_count": 8})
    (tmp_path / "made").mkdir()
    with pytest.raises(CheckpointError, match="wanted a dense model without experts"):
        make_gguf_folder(path, tmp_path / "made")


def test_a_file_that_is_cut_off_after_it_was_opened_has_no_identity(tmp_path: Path) -> None:
    """The samples are read, and not taken from the mapping, which would end the process."""
    checkpoint = _opened(_made(tmp_path))
    path = tmp_path / "model.gguf"
    wanted = checkpoint.identity()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    assert wanted
    with pytest.raises(CheckpointError, match=rf"{path}: truncated within tensor "):
        checkpoint.identity()


def test_biases_of_experts_are_rows_of_one_tensor(tmp_path: Path) -> None:
    checkpoint = _opened(_made(tmp_path, "gpt_oss"))
    wanted = weights_of(CONFIGS["gpt_oss"])
    for part, size in (("gate", 96), ("up", 96), ("down", 64)):
        for index in (0, 5, 7):
            name = f"model.layers.1.mlp.experts.{index}.{part}_proj.bias"
            assert checkpoint.shape(name) == (size,)
            assert checkpoint.format_and_shape(name) == ("F32", (1, size))
            np.testing.assert_array_equal(checkpoint.read(name), wanted[name])


@pytest.mark.parametrize(
    ("metadata", "windows"),
    [({}, (24, 0, 24)), ({"attention.sliding_window_pattern": 3}, (24, 24, 0))],
)
def test_gpt_oss_has_windows_by_the_period_of_llama_cpp(
    tmp_path: Path, metadata: dict[str, Any], windows: tuple[int, ...]
) -> None:
    path, folder = tmp_path / "model.gguf", tmp_path / "made"
    folder.mkdir()
    config = CONFIGS["gpt_oss"] | {"num_hidden_layers": 3}
    write_gguf(path, config, {}, {f"gpt-oss.{key}": value for key, value in metadata.items()})
    make_gguf_folder(path, folder)
    assert read_decoder_spec(folder).windows == windows


def test_gpt_oss_without_scaled_positions_has_plain_ones(tmp_path: Path) -> None:
    """Where config.json of Hugging Face says nothing it has YaRN."""
    spec = read_decoder_spec(_made(tmp_path, "gpt_oss", **{"rope.scaling.type": "none"}))
    assert spec.rope.kind == "default"


def test_an_mlp_of_gpt_oss_is_as_wide_as_its_experts(tmp_path: Path) -> None:
    folder = _made(tmp_path, "gpt_oss", feed_forward_length=None)
    assert read_decoder_spec(folder) == read_decoder_spec(_made_again(tmp_path / "again"))


def _made_again(folder: Path) -> Path:
    folder.mkdir()
    return _made(folder, "gpt_oss")


@pytest.mark.parametrize("part", ["gate_exps", "down_exps", "gate_inp"])
def test_a_bias_of_gpt_oss_that_is_missing_is_an_error(tmp_path: Path, part: str) -> None:
    path, name = tmp_path / "model.gguf", f"blk.1.ffn_{part}.bias"
    _rewritten(path, CONFIGS["gpt_oss"], lambda tensors: tensors.pop(name))
    (tmp_path / "made").mkdir()
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing: wanted shape \[8"):
        make_gguf_folder(path, tmp_path / "made")
