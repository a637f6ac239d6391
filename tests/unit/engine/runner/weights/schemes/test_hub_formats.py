"""Checkpoints that are quantised already, as hubs have them, have the values of their format."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError, ConfigError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.derived.quantised_source import QuantisedSource
from engine.runner.weights.schemes.integer_formats import Scaling, exact_format
from engine.runner.weights.schemes.quantization_config import read_quantization
from engine.runner.weights.schemes.scheme_weights import SchemeWeights
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.stored_formats import dequantise, quantise
from engine.runner.weights.tensor_files import TensorFiles
from tests.support.models.hub_formats import (
    PACKERS,
    Gptq,
    Packer,
    PackQuantized,
    Tensor,
    is_quantised,
    pack_folder,
    write_tensors,
)
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, weights_of
from tests.support.models.tiny_gguf import write_wide

CONFIG = CONFIGS["qwen2"] | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Rows of whole groups of 128, biases, and a head of its own."""


UP = "model.layers.0.mlp.up_proj.weight"


def _open(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_decoder_spec(folder))


def _packed(folder: Path, packer: Packer) -> dict[str, np.ndarray]:
    folder.mkdir()
    return pack_folder(folder, CONFIG, weights_of(CONFIG), packer)


@pytest.mark.parametrize("name", PACKERS)
def test_weights_have_the_values_that_the_format_defines(tmp_path: Path, name: str) -> None:
    values = _packed(tmp_path / "model", PACKERS[name])
    checkpoint = _open(tmp_path / "model")
    assert sorted(checkpoint.names()) == sorted(values)
    for tensor, wanted in values.items():
        assert checkpoint.shape(tensor) == wanted.shape
        found = checkpoint.read(tensor)
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32), tensor)
        stored = checkpoint.grouped(tensor)
        assert (stored.format, stored.shape) == checkpoint.format_and_shape(tensor)
        again = dequantise(stored).reshape(wanted.shape)
        np.testing.assert_array_equal(again.view(np.uint32), wanted.view(np.uint32), tensor)


def _move_to_own_file(folder: Path, name: str, values: dict[str, Any]) -> None:
    """Let a file of its own say how a folder's weights are quantised, as older tools wrote it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    (folder / name).write_text(json.dumps(values))


GPTQ_KEYS = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01}
AWQ_KEYS = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}


@pytest.mark.parametrize(
    ("name", "file", "keys"),
    [("gptq", "quantize_config.json", GPTQ_KEYS), ("awq", "quant_config.json", AWQ_KEYS)],
)
def test_older_folders_say_it_in_a_file_of_its_own(
    tmp_path: Path, name: str, file: str, keys: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    values = _packed(folder, PACKERS[name])
    description = _open(folder).quantization
    _move_to_own_file(folder, file, keys)
    checkpoint = _open(folder)
    assert checkpoint.quantization == description
    for tensor, wanted in values.items():
        np.testing.assert_array_equal(checkpoint.read(tensor), wanted, tensor)


@pytest.mark.parametrize(
    ("name", "file", "wrong", "said"),
    [
        ("gptq", "quantize_config.json", GPTQ_KEYS | {"bits": 3}, "bits is 3"),
        ("gptq", "quantize_config.json", {"quant_method": "marlin"}, "quant_method is 'marlin'"),
        ("awq", "quant_config.json", AWQ_KEYS | {"version": "GEMV"}, "version is 'GEMV'"),
    ],
)
def test_what_such_a_file_says_wrong_is_named(
    tmp_path: Path, name: str, file: str, wrong: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "model"
    _packed(folder, PACKERS[name])
    _move_to_own_file(folder, file, wrong)
    with pytest.raises(CheckpointError, match=f"{file}: {said}"):
        _open(folder)


Q4_0 = ("gptq", "pack-quantized", "pack-quantized, F16", "pack-quantized, channels")
STORED = {
    **dict.fromkeys((*Q4_0, "gptq, one group, without g_idx", "gptq, scales in BF16"), "Q4_0"),
    **dict.fromkeys(("awq", "awq, groups of 32", "awq, one group, BF16"), "Q8_0"),
    "gptq, groups of 32, any zeros": "Q8_0",
    "gptq_v2, groups of 64, any zeros": "Q8_0",
    "gptq, scales in F32": "F32",
    "gptq, desc_act": "F32",
    "gptq, 8 bits": "Q8_0",
    "gptq, 8 bits, any zeros": "F32",
    "fp8": "F32",
    "float-quantized, channels": "F32",
    "pack-quantized, any zeros": "Q8_0",
    "pack-quantized, zeros in bytes": "Q8_0",
    "pack-quantized, g_idx": "F32",
    "int-quantized": "Q8_0",
}


@pytest.mark.parametrize("name", STORED)
def test_weights_are_in_the_smallest_format_that_has_them_exactly(
    tmp_path: Path, name: str
) -> None:
    values = _packed(tmp_path / "model", PACKERS[name])
    checkpoint = _open(tmp_path / "model")
    found = {
        checkpoint.format_and_shape(tensor)[0]
        for tensor, value in values.items()
        if is_quantised(tensor, value)
    }
    assert found == {STORED[name]}


@pytest.mark.parametrize(
    ("highest", "zeros", "wanted"),
    [
        (15, (8, 8), "Q4_0"), (15, (7, 8), "Q8_0"), (15, (8, 9), "Q8_0"), (15, (0, 16), "Q8_0"),
        (255, (128, 128), "Q8_0"), (255, (127, 128), "F32"), (255, (128, 129), "F32"),
    ],
)  # fmt: skip
def test_groups_have_to_have_every_number_less_every_zero(
    highest: int, zeros: tuple[int, int], wanted: str
) -> None:
    scaling = Scaling(
        np.ones((1, 2), np.float32), np.array([zeros], np.int16), lowest=0, highest=highest
    )
    assert exact_format(scaling, 64) == wanted


def test_scales_that_float16_does_not_have_are_kept(tmp_path: Path) -> None:
    """In bfloat16, scales below 2^-17 have more bits than float16 has there."""
    small = {name: one * np.float32(2.0**-18) for name, one in weights_of(CONFIG).items()}
    packer = PackQuantized(group_size=32)
    values = pack_folder(tmp_path, CONFIG, small, packer)
    checkpoint = _open(tmp_path)
    assert checkpoint.format_and_shape(UP)[0] == "F32"
    np.testing.assert_array_equal(checkpoint.read(UP), values[UP])


def _greedy(folder: Path, **how: Any) -> tuple[list[int], bytes]:
    """The likeliest tokens after a prompt, and the bits of all logits."""
    runner = load(folder, **how)
    tokens, seen = prompt_of(20), b""
    start, found = 0, []
    for _ in range(6):
        [logits] = logits_of(runner, scheduled(tokens[start:], start, range(10)))
        start, seen = len(tokens), seen + logits.tobytes()
        found.append(int(logits.argmax()))
        tokens = [*tokens, found[-1]]
    return found, seen


SERVED = (
    "gptq", "gptq, groups of 32, any zeros", "gptq, desc_act", "awq", "fp8",
    "pack-quantized, any zeros", "float-quantized, channels", "int-quantized",
)  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_answers_are_those_of_the_same_weights_in_float32(tmp_path: Path, name: str) -> None:
    values = _packed(tmp_path / "packed", PACKERS[name])
    wide = write_wide(tmp_path / "wide", CONFIG, values)
    assert _greedy(tmp_path / "packed", activation_dtype="float32") == _greedy(wide)


def test_reference_operators_compute_with_the_same_values(tmp_path: Path) -> None:
    values = _packed(tmp_path / "packed", PACKERS["awq"])
    wide = write_wide(tmp_path / "wide", CONFIG, values)
    found, wanted = (
        _greedy(folder, attention_backend="paddle") for folder in (tmp_path / "packed", wide)
    )
    assert found == wanted


def test_floats_can_be_quantised_while_they_are_loaded(tmp_path: Path) -> None:
    values = _packed(tmp_path / "fp8", PACKERS["fp8"])
    source = QuantisedSource(_open(tmp_path / "fp8"), "Q8_0")
    wanted = quantise(values[UP], "Q8_0")
    np.testing.assert_array_equal(source.grouped(UP).rows, wanted.rows)
    wide = write_wide(tmp_path / "wide", CONFIG, values)
    in_groups = [load(folder, quantization="q8_0") for folder in (tmp_path / "fp8", wide)]
    found, exact = (logits_of(one, scheduled(prompt_of(9), 0, range(10))) for one in in_groups)
    np.testing.assert_array_equal(found, exact)


def test_the_log_says_how_weights_are_stored_and_whose_activations_they_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _packed(tmp_path / "fp8", PACKERS["fp8"])
    with caplog.at_level(logging.INFO, "pdserve.engine"):
        load(tmp_path / "fp8")
    said = "weights: stored in fp8, tiles of 128 by 128; activations as activation_dtype says"
    assert said in [record.message for record in caplog.records]


def test_integers_are_not_quantised_again(tmp_path: Path) -> None:
    _packed(tmp_path / "awq", PACKERS["awq"])
    with pytest.raises(ConfigError, match=r"quantization is q4_0, but .* is Q8_0: wanted none"):
        load(tmp_path / "awq", quantization="q4_0")


def test_the_identity_says_how_numbers_are_read(tmp_path: Path) -> None:
    """Nodes whose files are equal, and whose config.json are not, have other weights."""
    identities = []
    for index, version in enumerate(("gptq", "gptq_v2", "gptq")):
        folder = tmp_path / str(index)
        _packed(folder, Gptq())
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"gptq", "damp', f'"{version}", "damp'))
        identities.append(_open(folder).identity())
    assert identities[0] == identities[2] != identities[1]
    values = [_open(tmp_path / str(index)).read(UP) for index in range(3)]
    assert np.array_equal(values[0], values[2])
    assert not np.array_equal(values[0], values[1])


def _words(shape: tuple[int, int]) -> Tensor:
    draw = np.random.RandomState(0)
    return Tensor("I32", shape, draw.randint(0, 1 << 31, shape[0] * shape[1]).tolist())


@pytest.mark.parametrize("order", [1, -1], ids=["groups", "floats"])
def test_little_more_than_a_weight_is_in_memory(tmp_path: Path, order: int) -> None:
    """One of four million numbers: its words and what it becomes, and small parts of it."""
    outputs, inputs, groups = 2048, 2048, 16
    group_of = [place * groups // inputs for place in range(inputs)][::order]
    write_tensors(
        tmp_path / "model.safetensors",
        {
            "up.qweight": _words((inputs // 8, outputs)),
            "up.qzeros": _words((groups, outputs // 8)),
            "up.scales": Tensor("F16", (groups, outputs), [0.5] * groups * outputs),
            "up.g_idx": Tensor("I32", (inputs,), group_of),
        },
    )
    config = {"quantization_config": Gptq(is_ordered=order == 1).config()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = read_quantization(tmp_path)
    assert quantization is not None
    source = SchemeWeights(TensorFiles({tmp_path / "model.safetensors": ()}), quantization)
    source.check(tmp_path, "up.weight", (outputs, inputs))
    tracemalloc.start()
    try:
        made = source.grouped("up.weight").rows.nbytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made == {1: outputs * inputs // 32 * 34, -1: 4 * outputs * inputs}[order]
    assert peak < made + outputs * inputs // 2 + (6 << 20)
