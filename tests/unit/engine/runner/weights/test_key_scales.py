"""Channels of keys that are made about equally large before each is stored in a byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.runner.cache.kv_formats import widened_slots
from engine.runner.paddle import decoder
from engine.runner.start import assemble
from engine.runner.weights import key_scales as scales
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.support.models.running import kv_cache_of, load, logits_in_chunks
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, weights_of, write_checkpoint

FAMILIES = ["qwen2", "ernie_biased", "glm"]
PROMPT, TABLE = prompt_of(60), range(4)


def with_large_biases(folder: Path, name: str) -> Path:
    """A model that has a rotary pair of keys with large biases in each head."""
    config = CONFIGS[name]
    extra = {}
    for key, bias in weights_of(config).items():
        if key.endswith("k_proj.bias"):
            large = bias.reshape(config["num_key_value_heads"], -1).copy()
            large[:, 1] = 30.0
            extra[key] = large.reshape(-1)
    return write_checkpoint(folder / name, config, extra=extra)


def divisors_of(folder: Path, stored: str = "int8") -> np.ndarray:
    spec = read_decoder_spec(folder)
    return scales.key_scales(Checkpoint(folder, spec), "model.layers.0.", spec, stored)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_keys_of_a_pair_with_large_biases_are_divided_by_a_power_of_two(
    tmp_path: Path, name: str
) -> None:
    divisors = divisors_of(with_large_biases(tmp_path, name))
    assert (np.exp2(np.rint(np.log2(divisors))) == divisors).all()
    # Where neighbours are rotated, channel 1 is of pair 0.
    large = 1 if name == "qwen2" else 0
    assert (divisors.argmax(axis=1) == large).all()
    assert divisors[:, large].min() >= 16
    assert np.median(divisors, axis=1).tolist() == [1.0] * len(divisors)


@pytest.mark.parametrize(("name", "stored"), [("llama", "int8"), ("qwen2", "bfloat16")])
def test_other_keys_are_stored_as_they_are(tmp_path: Path, name: str, stored: str) -> None:
    assert (divisors_of(write_checkpoint(tmp_path / name, CONFIGS[name]), stored) == 1).all()


def test_channels_without_any_weight_are_not_divided(tmp_path: Path) -> None:
    config = CONFIGS["qwen2"]
    tensors = weights_of(config)
    zeros = {
        key: np.zeros_like(values)
        for key, values in tensors.items()
        if key.endswith(("k_proj.weight", "k_proj.bias"))
    }
    assert (divisors_of(write_checkpoint(tmp_path / "zeros", config, extra=zeros)) == 1).all()


@pytest.mark.parametrize("backend", ["numba", "paddle"])
@pytest.mark.parametrize("name", FAMILIES)
def test_division_changes_no_bit_where_keys_are_not_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    folder = with_large_biases(tmp_path, name)
    wanted = logits_in_chunks(load(folder, attention_backend=backend), PROMPT, TABLE, 17)
    # Divide in float32 as well.
    for module in (scales, decoder):
        monkeypatch.setattr(module, "has_key_scales", lambda spec, stored: True)
    divided = load(folder, attention_backend=backend)
    np.testing.assert_array_equal(logits_in_chunks(divided, PROMPT, TABLE, 17), wanted)
    keys = kv_cache_of(divided).slots()[0][0].view(np.float32)
    assert 0 < np.abs(keys[1:4]).max() < 15  # they were divided


@pytest.mark.parametrize("name", FAMILIES)
def test_every_channel_of_divided_keys_is_near_to_the_one_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = with_large_biases(tmp_path, name)
    exact = keys_of(folder, "float32")
    divisors = np.tile(divisors_of(folder), 2)[:, np.newaxis]
    error = worst_channel(keys_of(folder, "int8") * divisors, exact)
    monkeypatch.setattr(scales, "has_key_scales", lambda spec, stored: False)
    undivided_error = worst_channel(keys_of(folder, "int8"), exact)
    assert error < 0.02
    assert undivided_error > 5 * error


def keys_of(folder: Path, stored: str) -> np.ndarray:
    """The first layer's keys of full blocks, `[blocks, kv_heads, block_size, head_dim]`."""
    runner = load(folder, kv_cache_dtype=stored)
    logits_in_chunks(runner, PROMPT, TABLE, len(PROMPT))
    return widened_slots(kv_cache_of(runner).slots()[0][0][: len(PROMPT) // 16], stored)


def worst_channel(keys: np.ndarray, exact: np.ndarray) -> float:
    """The largest mean error of a channel, as a share of its mean size."""
    errors = np.abs(keys - exact).mean(axis=(0, 2)) / np.abs(exact).mean(axis=(0, 2))
    return float(errors.max())


def test_nodes_that_divide_keys_have_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_large_biases(tmp_path, "qwen2")
    divided = load(folder, kv_cache_dtype="int8").layout
    monkeypatch.setattr(assemble, "has_key_scales", lambda spec, stored: False)
    undivided = load(folder, kv_cache_dtype="int8").layout
    assert divided.fingerprint != undivided.fingerprint


def test_nodes_that_divide_keys_by_other_numbers_have_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_large_biases(tmp_path, "qwen2")
    one = load(folder, kv_cache_dtype="int8").layout
    original = scales.key_scales
    monkeypatch.setattr(scales, "key_scales", lambda *given: 2 * original(*given))
    assert load(folder, kv_cache_dtype="int8").layout.fingerprint != one.fingerprint
