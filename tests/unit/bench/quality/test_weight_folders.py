"""Weights in other formats: their values, and that kernels compute what float32 gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.quality.perplexity import Combination, load, score
from bench.quality.weight_folders import ALL_WEIGHTS, AS_F32, GROUPED, WIDE, weight_folder
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.derived.quantised_source import QuantisedSource
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.stored_formats import dequantise, quantise
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from tests.support.models.hub_formats import PackQuantized, pack_folder
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, weights_of, write_checkpoint
from tests.support.models.tiny_gguf import FORMATS, write_gguf

PROMPT = prompt_of(60)
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def scores(model: Path, weights: str, activation_dtype: str = "float32") -> np.ndarray:
    with weight_folder(model, weights) as found:
        runner = load(found, Combination(weights, activation_dtype, "float32"), len(PROMPT), 1)
        return score(runner, PROMPT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), CONFIGS["llama"])


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several grouped formats, with heads of neighbouring rotary pairs."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "model.gguf", CONFIGS["llama"], FORMATS)
    (folder / "model").mkdir()
    make_gguf_folder(folder / "model.gguf", folder / "model")
    return folder / "model"


def test_a_folder_that_is_quantised_already_is_written_in_float32(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    values = pack_folder(tmp_path, config, weights_of(config), PackQuantized(group_size=32))
    with weight_folder(tmp_path, "f32") as found:
        source = Checkpoint(found.folder, read_decoder_spec(found.folder))
        assert source.grouped(WEIGHT).format == "F32"
        np.testing.assert_array_equal(source.read(WEIGHT), values[WEIGHT])


@pytest.mark.parametrize("name", [name for name in ALL_WEIGHTS if not name.endswith(AS_F32)])
def test_weights_have_the_values_of_their_format(model: Path, name: str) -> None:
    exact = weights_of(CONFIGS["llama"])[WEIGHT]
    with weight_folder(model, name) as found:
        assert found.quantization == (name if name in GROUPED else "none")
        source = Checkpoint(found.folder, read_decoder_spec(found.folder))
        assert source.grouped(WEIGHT).format == WIDE.get(name, "F32")
        values = source.read(WEIGHT)
    assert values.shape == exact.shape
    if name == "f16":
        exact = exact.astype(np.float16).astype(np.float32)
    if name == "bf16":
        exact = nearest_bfloat16(exact)
    np.testing.assert_array_equal(values, exact)
    assert not found.folder.exists() or found.folder == model


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the nearer of the two neighbours, without a tie among these values."""
    below = (values.view(np.uint32) >> 16 << 16).view(np.float32)
    above = ((values.view(np.uint32) >> 16) + 1 << 16).view(np.float32)
    assert not (abs(values - below) == abs(above - values)).any()
    nearest: np.ndarray = np.where(abs(values - below) < abs(above - values), below, above)
    return nearest


@pytest.mark.parametrize("name", GROUPED)
def test_values_of_groups_are_written_in_float32(model: Path, name: str) -> None:
    exact = weights_of(CONFIGS["llama"])
    with weight_folder(model, name + AS_F32) as found:
        assert found.quantization == "none"
        source = Checkpoint(found.folder, read_decoder_spec(found.folder))
        assert {source.grouped(one).format for one in source.names()} == {"F32"}
        for weight, wanted in ((WEIGHT, name.upper()), ("lm_head.weight", "Q8_0")):
            values = dequantise(quantise(exact[weight], wanted))
            np.testing.assert_array_equal(source.read(weight), values)


@pytest.mark.parametrize("name", ["f16", "bf16", *GROUPED])
def test_each_format_is_computed_as_its_values_in_float32(model: Path, name: str) -> None:
    found = scores(model, name)
    np.testing.assert_array_equal(found, scores(model, name + AS_F32))
    assert not np.array_equal(found, scores(model, "f32"))


def test_a_file_is_computed_as_its_values_in_float32(gguf_model: Path) -> None:
    np.testing.assert_array_equal(scores(gguf_model, "file"), scores(gguf_model, "f32"))
    assert not np.array_equal(scores(gguf_model, "file"), scores(gguf_model, "file", "int8"))


@pytest.mark.parametrize("name", WIDE)
def test_int8_activations_change_nothing_without_groups(model: Path, name: str) -> None:
    np.testing.assert_array_equal(scores(model, name), scores(model, name, "int8"))


def test_a_file_in_groups_can_be_in_other_groups(gguf_model: Path) -> None:
    """Its values are what is quantised, and nothing stays as it was in the file."""
    with weight_folder(gguf_model, "q4_0") as found:
        spec = read_decoder_spec(found.folder)
        source = QuantisedSource(Checkpoint(found.folder, spec), found.quantization.upper())
        formats = {source.format_and_shape(name)[0] for name in source.names()}
    assert formats == {"F32", "Q4_0", "Q8_0"}
