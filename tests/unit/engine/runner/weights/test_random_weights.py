"""`--load-format random`: a model of config.json's shape without weights, the same everywhere."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from common.settings.config import ModelConfig, SpeculationConfig
from engine.runner.mtp.mtp_weights import read_mtp_weights
from engine.runner.start.load import checked_checkpoint
from engine.runner.weights.random_weights import RandomWeights
from engine.runner.weights.spec.decoder_tensors import CHOICE_BIAS, EXPERT_GATE, expected_shapes
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from pdserve.checkpoints.speculative_model import resolve_speculation
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

QWEN3 = CONFIGS["qwen3"]
GATE = "model.layers.0.mlp.gate_proj.weight"
BITS, IDENTITY = "5e76e28075d5e31e", "98e434e09b561514"
"""The starts of digests of all tensors of the small Qwen3, and of their names and shapes."""
OF_MIXTURES = {
    "qwen3_moe": ("bb7f236bb72a1348", "14914366a452bbe2"),
    "ernie_moe": ("aded7c2e137d8701", "73b035c6953f9d12"),
}
"""The same of mixtures, taken with the release before experts could have other functions."""
OTHER_PROCESS = """
import sys
from pathlib import Path
from tests.unit.engine.runner.weights.test_random_weights import bits_of_all, source_of
print(bits_of_all(source_of(Path(sys.argv[1]))))
"""


def shape_only(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def source_of(folder: Path) -> RandomWeights:
    return RandomWeights(read_decoder_spec(folder))


def source_spec(folder: Path, name: str) -> DecoderSpec:
    return read_decoder_spec(shape_only(folder, CONFIGS[name]))


def bits_of(source: RandomWeights, name: str) -> str:
    return hashlib.sha256(source.grouped(name).rows.tobytes()).hexdigest()[:16]


def bits_of_all(source: RandomWeights) -> dict[str, str]:
    return {name: bits_of(source, name) for name in source.names()}


def wide_spec(folder: Path) -> DecoderSpec:
    spec = read_decoder_spec(shape_only(folder, QWEN3))
    return replace(spec, hidden_size=1024, intermediate_size=3000)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_tensor_of_a_decoder_is_made_in_its_shape(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    source = source_of(shape_only(tmp_path, config))
    shapes = expected_shapes(read_decoder_spec(tmp_path))
    assert {name: source.read(name).shape for name in source.names()} == shapes
    for name, shape in shapes.items():
        source.check(tmp_path, name, shape)
        stored = source.grouped(name)
        assert (stored.format, stored.shape) == source.format_and_shape(name)
        assert stored.rows.shape == (stored.shape[0], 2 * stored.shape[1])
        assert stored.rows.flags.c_contiguous


def test_bits_are_the_same_in_every_process_and_thread(tmp_path: Path) -> None:
    source = source_of(shape_only(tmp_path, QWEN3))
    first = bits_of_all(source)
    assert first == bits_of_all(source) == bits_of_all(source_of(tmp_path))
    with ThreadPoolExecutor(4) as threads:
        found = dict(
            zip(first, threads.map(lambda name: bits_of(source, name), first), strict=True)
        )
    assert found == first
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(first)


@pytest.mark.parametrize(("name", "wanted"), [("qwen3", (BITS, IDENTITY)), *OF_MIXTURES.items()])
def test_bits_stay_those_of_this_version(
    tmp_path: Path, name: str, wanted: tuple[str, str]
) -> None:
    """Nodes of two releases exchange KV: other bits need another version in the identity."""
    source = source_of(shape_only(tmp_path, CONFIGS[name]))
    found = hashlib.sha256(str(bits_of_all(source)).encode()).hexdigest()
    assert (found[:16], source.identity()[:16]) == wanted


def test_sinks_are_as_large_as_scores_of_keys(tmp_path: Path) -> None:
    spec = replace(source_spec(tmp_path, "gpt_oss"), num_heads=4096, num_kv_heads=1)
    sinks = RandomWeights(spec).read("model.layers.1.self_attn.sinks")
    assert abs(sinks.mean()) < 0.05
    assert abs(sinks.std() - 1) < 0.05


def test_other_tensors_have_other_bits(tmp_path: Path) -> None:
    found = bits_of_all(source_of(shape_only(tmp_path, CONFIGS["ernie_biased"])))
    drawn = [bits for name, bits in found.items() if not name.endswith("norm.weight")]
    assert len(set(drawn)) == len(drawn)


def test_a_tensor_begins_as_a_longer_one_of_its_name(tmp_path: Path) -> None:
    """So any part can be made alone; sizes around what is looked up at a time."""
    spec = wide_spec(tmp_path)
    longest = RandomWeights(replace(spec, vocab_size=300)).read("lm_head.weight")
    for rows in (1, 3, 127, 128, 129, 255, 256, 257):
        part = RandomWeights(replace(spec, vocab_size=rows)).read("lm_head.weight")
        np.testing.assert_array_equal(part, longest[:rows])
    narrow = replace(spec, hidden_size=1)
    three, eight = (
        RandomWeights(replace(narrow, vocab_size=rows)).read("lm_head.weight") for rows in (3, 8)
    )
    np.testing.assert_array_equal(three, eight[:3])


def test_values_are_normal_and_scaled_by_their_inputs(tmp_path: Path) -> None:
    spec = replace(wide_spec(tmp_path), num_layers=8)
    source = RandomWeights(spec)
    for name, wanted in (
        (GATE, 1 / 32),
        ("model.layers.7.mlp.down_proj.weight", 1 / (3000**0.5 * 4)),
        ("model.layers.3.self_attn.o_proj.weight", 1 / (128**0.5 * 4)),
    ):
        values = source.read(name) / wanted
        assert abs(values.mean()) < 0.01
        assert abs(values.std() - 1) < 0.01
        assert abs((np.abs(values) < 1).mean() - 0.683) < 0.01
        assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.01
    np.testing.assert_array_equal(source.read("model.layers.0.input_layernorm.weight"), 1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_mean_something(tmp_path: Path, config: dict[str, Any]) -> None:
    """They have a spread, and depend on what was said long ago."""
    folder = shape_only(tmp_path, config | {"vocab_size": 1600})
    runner = load(folder, load_format="random", attention_backend="auto")
    prompt = prompt_of(60)
    [logits] = logits_of(runner, scheduled(prompt, 0, range(10)))
    assert np.isfinite(logits).all()
    assert 2 < logits.std() < 8
    prompt[0] += 1
    [other] = logits_of(runner, scheduled(prompt, 0, range(10)))
    assert np.abs(logits - other).max() > 0.05


def test_every_back_end_computes_the_same_model(tmp_path: Path) -> None:
    folder = shape_only(tmp_path, QWEN3)
    batch = scheduled(prompt_of(33), 0, range(10))
    kernels, operators = (
        logits_of(load(folder, load_format="random", attention_backend=name), batch)
        for name in ("numba", "paddle")
    )
    np.testing.assert_allclose(kernels, operators, atol=2e-4)


def test_they_can_be_quantised(tmp_path: Path) -> None:
    folder = shape_only(tmp_path, QWEN3)
    batch = scheduled(prompt_of(33), 0, range(10))
    wide, groups = (
        logits_of(load(folder, load_format="random", quantization=name), batch)[0]
        for name in ("none", "q8_0")
    )
    assert 0 < np.abs(wide - groups).max() < 0.5


def test_nodes_with_real_weights_take_no_kv_of_random_ones(tmp_path: Path) -> None:
    """Not even where the real ones are of the same shape and type."""
    folder = write_checkpoint(tmp_path, QWEN3, dtype="BF16")
    real, made = (load(folder, load_format=name) for name in ("auto", "random"))
    assert real.layout.model_digest != made.layout.model_digest
    assert made.layout.fingerprint == load(folder, load_format="random").layout.fingerprint


def test_other_shapes_are_other_weights(tmp_path: Path) -> None:
    spec = wide_spec(tmp_path)
    others = [spec, replace(spec, num_layers=3), replace(spec, vocab_size=98)]
    assert len({RandomWeights(one).identity() for one in others}) == 3


@pytest.mark.parametrize("has_file", [False, True])
def test_a_node_says_that_weights_are_random_and_files_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_file: bool
) -> None:
    folder = shape_only(tmp_path, QWEN3)
    if has_file:
        (folder / "model.safetensors").write_bytes(b"not even safetensors")
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        load(folder, load_format="random")
    [line] = [one for one in caplog.messages if "random" in one]
    assert f"of the shape that {folder / 'config.json'} says: answers mean nothing" in line
    assert line.endswith(f"; load_format random ignores {folder / 'model.safetensors'}") == has_file


def test_a_folder_without_a_shape_is_refused(tmp_path: Path) -> None:
    for folder, words in (
        (tmp_path, r"config\.json: no such file"),
        (tmp_path / "gone", r"gone: no such folder"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checked_checkpoint(ModelConfig(model=str(folder), load_format="random"))


def test_without_the_setting_weights_are_wanted_as_before(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights: wanted model\.safetensors"):
        checked_checkpoint(ModelConfig(model=str(shape_only(tmp_path, QWEN3))))


def test_tensors_that_are_not_made_are_named(tmp_path: Path) -> None:
    source = source_of(shape_only(tmp_path, QWEN3))
    for name, shape, dtypes, words in (
        ("model.bias", (3,), None, r"tensor model\.bias is not made: wanted shape \[3\]"),
        (GATE, (3, 64), None, r"is BF16 \[96, 64\]: wanted shape \[3, 64\]"),
        (GATE, (96, 64), ("I32",), r"is BF16 \[96, 64\]: wanted shape \[96, 64\] of I32"),
    ):
        with pytest.raises(CheckpointError, match=words):
            source.check(tmp_path, name, shape, dtypes)


def test_there_is_no_drafting_layer_among_them(tmp_path: Path) -> None:
    """The demo model's is for the demo model's weights, and none is made."""
    folder = shape_only(tmp_path, CONFIGS["llama"])
    asked = SpeculationConfig(speculative_method="mtp")
    assert resolve_speculation(asked, folder, load_format="random") == asked
    spec = read_decoder_spec(folder)
    with pytest.raises(CheckpointError, match=r"no MTP layer in it: wanted .*--speculative-model"):
        read_mtp_weights("", folder, RandomWeights(spec), spec)


def _mixture_spec(folder: Path, name: str, **changed: Any) -> DecoderSpec:
    """The shape of `name` with 64 experts, of which a token has 8, and `changed` of its mixture."""
    spec = read_decoder_spec(shape_only(folder, CONFIGS[name]))
    assert spec.experts is not None
    sizes = {"num_experts": 64, "num_chosen": 8, "inner_size": 96} | changed
    experts = replace(spec.experts, **sizes)
    return replace(spec, hidden_size=256, num_layers=8, experts=experts)


def _mixture_outputs(spec: DecoderSpec, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen experts `[rows, chosen]` and what layer 1 adds, `[rows, hidden]`."""
    source, mixture, prefix = RandomWeights(spec), spec.experts, "model.layers.1."
    assert mixture is not None

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        product: np.ndarray = x @ source.read(f"{prefix}{name}.weight").T
        has_bias = f"{prefix}{name}.bias" in source.names()
        return product + source.read(f"{prefix}{name}.bias") if has_bias else product

    def mlp(part: str, x: np.ndarray) -> np.ndarray:
        gate, up = (linear(f"{part}.{name}_proj", x) for name in ("gate", "up"))
        steepness = 1.0
        if mixture is not None and mixture.clamped_swish is not None:
            steepness, limit = mixture.clamped_swish.steepness, mixture.clamped_swish.limit
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
        return linear(f"{part}.down_proj", gate / (1 + np.exp(-steepness * gate)) * up)

    products = linear(EXPERT_GATE, rows)
    if mixture.is_sigmoid:
        scores = 1 / (1 + np.exp(-products))
    else:
        scores = np.exp(products)
        scores /= scores.sum(axis=1, keepdims=True)
    wanted = scores
    if mixture.has_choice_bias:
        wanted = scores + source.read(prefix + CHOICE_BIAS)
    chosen = np.argsort(-wanted, axis=1, kind="stable")[:, : mixture.num_chosen]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if mixture.is_normalised:
        weights /= weights.sum(axis=1, keepdims=True)
    weights *= mixture.weight_scale
    added = np.zeros_like(rows)
    for expert in range(mixture.num_experts):
        at = np.nonzero(chosen == expert)
        added[at[0]] += mlp(f"mlp.experts.{expert}", rows[at[0]]) * weights[at][:, None]
    if mixture.shared_size:
        added += mlp("mlp.shared_experts", rows)
    return chosen, added


MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "normalised": ("qwen3_moe", {}),
    "unnormalised": ("qwen3_moe_mixed", {}),
    "one of many": ("qwen3_moe_mixed", {"num_chosen": 1}),
    "all": ("qwen3_moe", {"num_chosen": 64}),
    "shared, biased choice": ("ernie_moe", {"shared_size": 192}),
    "biased choice": ("ernie_moe", {"shared_size": 0}),
    "clamped": ("gpt_oss", {}),
    "clamped at little": ("gpt_oss_newer", {"num_chosen": 4}),
    "sigmoids": ("ernie_moe", {"is_sigmoid": True, "weight_scale": 2.5, "shared_size": 0}),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_adds_as_much_as_one_mlp(tmp_path: Path, name: str) -> None:
    config, changed = MIXTURES[name]
    spec = _mixture_spec(tmp_path, config, **changed)
    rows = np.random.RandomState(0).standard_normal((1600, 256)).astype(np.float32)
    chosen, added = _mixture_outputs(spec, rows)
    products = np.random.RandomState(1).standard_normal((2, 100_000))
    of_an_mlp = products[0] / (1 + np.exp(-products[0])) * products[1]
    wanted = np.sqrt(np.square(of_an_mlp).mean()) / np.sqrt(2 * spec.num_layers)
    found = np.sqrt(np.square(added).mean())
    assert 0.8 < found / wanted < 1.25
    per_expert = np.bincount(chosen.reshape(-1), minlength=64)
    usual = chosen.size / 64
    assert per_expert.min() > 0.3 * usual, "no expert is left out"
    assert per_expert.max() < 3 * usual, "none has most of the tokens"


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_moe_mixed", "ernie_moe", "ernie_moe_untied", "gpt_oss"]
)
def test_nodes_with_a_random_mixture_agree(tmp_path: Path, name: str) -> None:
    folder = shape_only(tmp_path, CONFIGS[name] | {"vocab_size": 1600})
    first, second = (
        load(folder, load_format="random", attention_backend="paddle") for _ in range(2)
    )
    assert first.layout.fingerprint == second.layout.fingerprint
    found, again = (
        logits_of(one, scheduled(prompt_of(60), 0, range(10))) for one in (first, second)
    )
    np.testing.assert_array_equal(found, again)
    assert 2 < np.std(found[0]) < 8


def test_how_experts_are_chosen_is_a_part_of_the_identity(tmp_path: Path) -> None:
    """It decides how large their matrices are."""
    spec = _mixture_spec(tmp_path, "qwen3_moe")
    others = [
        _mixture_spec(tmp_path, "qwen3_moe", num_chosen=4),
        _mixture_spec(tmp_path, "qwen3_moe", is_normalised=False),
    ]
    assert len({RandomWeights(one).identity() for one in (spec, *others)}) == 3
