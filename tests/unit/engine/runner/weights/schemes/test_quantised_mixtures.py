"""Mixtures of experts as hubs have them quantised: expert by expert, with the gate left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.derived.quantised_source import QuantisedSource
from engine.runner.weights.random_weights import RandomWeights
from engine.runner.weights.spec.decoder_tensors import CHOICE_BIAS, EXPERT_GATE
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.support.models.hub_formats import (
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
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    prompt_of,
    weights_of,
    write_checkpoint,
)
from tests.support.models.tiny_gguf import write_wide

CONFIG = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1, "num_experts": 4}
MIXED = CONFIGS["qwen3_moe_mixed"] | {"num_experts": 4}
"""The first layer has one MLP, with a `gate_proj` beside the gate of the second."""
GATE = "model.layers.0.mlp.gate.weight"
DOWN = "model.layers.0.mlp.experts.2.down_proj"
PACKED = PackQuantized(group_size=32)


def _write(
    folder: Path,
    packer: Packer,
    quantization: dict[str, Any],
    config: dict[str, Any] = CONFIG,
    is_left: Callable[[str], bool] = lambda name: name.endswith(f"{EXPERT_GATE}.weight"),
) -> dict[str, np.ndarray]:
    """Pack all linear layers but those that `is_left` names; return the values of all tensors."""
    tensors: dict[str, Tensor] = {}
    values = {}
    for seed, (name, weight) in enumerate(weights_of(config).items()):
        if is_left(name) or name.endswith(CHOICE_BIAS) or not is_quantised(name, weight):
            tensors[name], values[name] = floats("F32", weight), weight
            continue
        parts, values[name] = packer.pack(weight, seed)
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in parts.items()}
    folder.mkdir(exist_ok=True)
    described = {**config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(described))
    write_tensors(folder / "model.safetensors", tensors)
    return values


def _opened(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_decoder_spec(folder))


def _check(folder: Path, values: dict[str, np.ndarray]) -> Checkpoint:
    checkpoint = _opened(folder)
    for name, wanted in values.items():
        np.testing.assert_array_equal(checkpoint.read(name), wanted, name)
    return checkpoint


LEFT = {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}


@pytest.mark.covers("K25")
@pytest.mark.parametrize("more", [{}, LEFT, {"dynamic": {"-:.*mlp\\.gate": {}}}])
def test_gptq_with_a_gate_that_was_left_alone(tmp_path: Path, more: dict[str, Any]) -> None:
    packer = Gptq(group_size=32)
    checkpoint = _check(tmp_path, _write(tmp_path, packer, packer.config() | more))
    assert checkpoint.format_and_shape(GATE) == ("F32", (4, 64))
    assert checkpoint.format_and_shape(f"{DOWN}.weight") == ("Q4_0", (64, 32))


@pytest.mark.covers("K25")
@pytest.mark.parametrize("packer", [Awq(32), Fp8(32, 32)])
def test_awq_and_fp8_with_a_gate_that_was_left_alone(tmp_path: Path, packer: Packer) -> None:
    _check(tmp_path, _write(tmp_path, packer, packer.config() | LEFT))


@pytest.mark.covers("K25")
def test_a_gate_that_was_quantised_has_its_values(tmp_path: Path) -> None:
    """Some tools quantised it, and the file does not say so but by its tensors."""
    config = CONFIG | {"num_experts": 8}
    packer = Gptq(group_size=32)
    values = _write(tmp_path, packer, packer.config(), config, lambda name: False)
    checkpoint = _check(tmp_path, values)
    assert checkpoint.format_and_shape(GATE) == ("Q4_0", (8, 64))


@pytest.mark.covers("K25")
@pytest.mark.parametrize(
    "ignored",
    [
        "re:.*mlp.gate$",
        "re:.*mlp\\.gate$",
        "re:model.layers.*.mlp.gate$",
        "model.layers.1.mlp.gate",
    ],
)
def test_ignored_gates_of_compressed_tensors(tmp_path: Path, ignored: str) -> None:
    """The MLP of the first layer and all experts have a `gate_proj`, which is not ignored."""
    config = PACKED.config() | {"ignore": ["lm_head", ignored]}
    checkpoint = _check(tmp_path, _write(tmp_path, PACKED, config, MIXED))
    for name in ("model.layers.0.mlp", "model.layers.1.mlp.experts.3"):
        assert checkpoint.format_and_shape(f"{name}.gate_proj.weight")[0] == "Q4_0"


def test_a_pattern_ignores_the_names_that_begin_with_what_it_matches(tmp_path: Path) -> None:
    """As the tool that wrote the file read it: one that does not end may name `gate_proj` too."""
    config = PACKED.config() | {"ignore": ["lm_head", "re:.*mlp.gate"]}

    def is_left(name: str) -> bool:
        return ".mlp.gate" in name

    checkpoint = _check(tmp_path, _write(tmp_path, PACKED, config, MIXED, is_left))
    assert checkpoint.format_and_shape("model.layers.0.mlp.gate_proj.weight")[0] == "F32"
    expert = "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert checkpoint.format_and_shape(expert)[0] == "Q4_0"


def test_a_gate_that_a_group_has_but_the_file_has_plainly_is_named(tmp_path: Path) -> None:
    _write(tmp_path, PACKED, PACKED.config() | {"ignore": ["lm_head"]})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate\.weight_packed is missing"):
        _opened(tmp_path)


@pytest.mark.covers("K28")
@pytest.mark.parametrize(
    ("packer", "part"),
    [
        *((Gptq(group_size=32), part) for part in ("qweight", "qzeros", "scales")),
        *((Awq(32), part) for part in ("qweight", "qzeros", "scales")),
        *((Fp8(32, 32), part) for part in ("weight", "weight_scale_inv")),
        *((PACKED, part) for part in ("weight_packed", "weight_scale")),
    ],
)
def test_a_part_of_one_expert_that_is_missing_is_named(
    tmp_path: Path, packer: Packer, part: str
) -> None:
    ignore = {"ignore": ["lm_head", "re:.*mlp.gate$"]} if packer is PACKED else {}
    _write(tmp_path, packer, packer.config() | ignore)
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        path.read_bytes().replace(f"{DOWN}.{part}".encode(), b"x" * len(f"{DOWN}.{part}"))
    )
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.{part}.* is missing"):
        _opened(tmp_path)


@pytest.mark.parametrize("packer", [Gptq(group_size=32), Fp8(32, 32)])
def test_a_quantised_mixture_computes_what_its_values_compute(
    tmp_path: Path, packer: Packer
) -> None:
    packed, wide = tmp_path / "packed", tmp_path / "wide"
    values = _write(packed, packer, packer.config())
    write_wide(wide, CONFIG, values)
    prompt = scheduled(prompt_of(33), 0, range(10))
    found, wanted = (
        logits_of(load(one, attention_backend="paddle"), prompt) for one in (packed, wide)
    )
    np.testing.assert_array_equal(found, wanted)


def test_biases_of_experts_are_refused_unless_they_are_zeros(tmp_path: Path) -> None:
    zeros = {f"{DOWN}.bias": np.zeros(64, np.float32)}
    _opened(write_checkpoint(tmp_path, CONFIG, extra=zeros))
    zeros[f"{DOWN}.bias"][3] = 1e-3
    write_checkpoint(tmp_path, CONFIG, extra=zeros)
    with pytest.raises(
        CheckpointError, match=r"experts\.2\.down_proj\.bias is a bias of an expert"
    ):
        _opened(tmp_path)


@pytest.mark.covers("K26")
@pytest.mark.parametrize("name", ["qwen3_moe", "ernie_moe", "ernie_moe_untied"])
def test_what_chooses_experts_is_not_quantised_while_loading(tmp_path: Path, name: str) -> None:
    """With 64 experts the bias of the choice has whole groups too."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    spec = read_decoder_spec(tmp_path)
    assert spec.experts is not None
    spec = replace(spec, experts=replace(spec.experts, num_experts=64))
    wide = RandomWeights(spec)
    source = QuantisedSource(wide, "Q4_0")
    for tensor in source.names():
        stored, shape = source.format_and_shape(tensor)
        is_kept = tensor.endswith((f".{EXPERT_GATE}.weight", ".bias", "_bias", "norm.weight"))
        kept_at_8 = tensor in ("model.embed_tokens.weight", "lm_head.weight")
        whole_groups = shape[1] % 32 == 0
        wanted = "BF16" if is_kept or not whole_groups else "Q8_0" if kept_at_8 else "Q4_0"
        assert stored == wanted, tensor
        if is_kept:
            np.testing.assert_array_equal(source.read(tensor), wide.read(tensor))
