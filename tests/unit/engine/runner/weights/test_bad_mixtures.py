"""A mixture of experts that cannot be is refused, with the key or the tensor that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    weights_of,
    write_checkpoint,
    write_safetensors,
)

QWEN3, ERNIE, GLM = "qwen3_moe", "ernie_moe", "glm4_moe"
UP = "model.layers.1.mlp.experts.5.up_proj.weight"
GATE = "model.layers.1.mlp.gate.weight"
BIAS = "model.layers.1.mlp.moe_statics.e_score_correction_bias"


def _refused(folder: Path, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(folder, read_decoder_spec(folder))


NUMBERS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
ERNIE_NUMBERS = ("moe_num_experts", "moe_k", "moe_intermediate_size", "moe_layer_interval")


@pytest.mark.parametrize("value", [0, -1, True, "8", 2.0, [8], 10**9 * 64])
@pytest.mark.parametrize(
    ("name", "key"),
    [*((QWEN3, key) for key in NUMBERS), *((ERNIE, key) for key in ERNIE_NUMBERS)],
)
def test_counts_and_sizes_that_cannot_be(tmp_path: Path, name: str, key: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | {key: value}))
    if value == 10**9 * 64 and key in ("decoder_sparse_step", "moe_layer_interval"):
        assert read_decoder_spec(tmp_path).experts is None, "no layer is so far"
        return
    _refused(tmp_path, rf"config\.json: {key} is {re.escape(repr(value))}: wanted")


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        (QWEN3, "num_local_experts", True, "is True: wanted a whole number"),
        (QWEN3, "num_local_experts", 2, "is 3: wanted at most num_local_experts, 2"),
        ("mixtral", "num_local_experts", 1, "is 2: wanted at most num_local_experts, 1"),
        ("mixtral", "num_local_experts", 0, "is 0: wanted a whole number"),
        (QWEN3, "num_experts_per_tok", 9, "is 9: wanted at most num_experts, 8"),
        (ERNIE, "moe_k", 9, "is 9: wanted at most moe_num_experts, 8"),
        *(
            (QWEN3, "mlp_only_layers", value, "wanted a list of layers, 0 to 1, or null")
            for value in (0, "0", {"0": True}, ["0"], [True], [0.0], [None], [2], [-1], [0, 9])
        ),
        (QWEN3, "norm_topk_prob", 1, "is 1: wanted true or false"),
        (QWEN3, "norm_topk_prob", "false", "is 'false': wanted true or false"),
        (ERNIE, "moe_num_shared_experts", False, "is False: wanted a whole number"),
        (ERNIE, "moe_num_shared_experts", True, "is True: wanted a whole number"),
        (ERNIE, "moe_num_shared_experts", -1, "is -1: wanted a whole number"),
        (ERNIE, "moe_num_shared_experts", 1.0, "wanted a whole number"),
        (ERNIE, "moe_norm_min", 0, "is 0: wanted a number above 0"),
        (ERNIE, "moe_norm_min", True, "is True: wanted a number above 0"),
        *(
            (ERNIE, f"moe_layer_{end}_index", value, "wanted the index of a layer")
            for end in ("start", "end")
            for value in (True, "1", [1, 1], -2, 1.0)
        ),
        (ERNIE, "use_bias", True, "is True: wanted false"),
        (GLM, "n_group", 8, "is 8: wanted 1: all experts are in one group"),
        (GLM, "topk_group", 2, "is 2: wanted 1: all experts are in one group"),
        (GLM, "num_experts_per_tok", 9, "is 9: wanted at most n_routed_experts, 8"),
        (GLM, "first_k_dense_replace", -1, "is -1: wanted a whole number"),
        (GLM, "n_shared_experts", True, "is True: wanted a whole number"),
        (GLM, "routed_scaling_factor", 0, "is 0: wanted a number above 0"),
        (GLM, "use_qk_norm", 1, "is 1: wanted true or false"),
    ],
)
def test_values_that_say_nothing_are_named(
    tmp_path: Path, name: str, key: str, value: Any, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | {key: value}))
    _refused(tmp_path, rf"config\.json: \w+ (is .*)?{said}")


@pytest.mark.parametrize(("name", "key"), [(QWEN3, "num_experts"), (ERNIE, "moe_num_experts")])
@pytest.mark.parametrize(
    ("num_layers", "num_experts", "most"), [(4096, 65536, 32), (512, 257, 256)]
)
def test_layers_and_experts_that_are_possible_alone_and_too_many_together(
    tmp_path: Path, name: str, key: str, num_layers: int, num_experts: int, most: int
) -> None:
    """The names of their tensors would fill the memory before one of them is missing."""
    config = CONFIGS[name] | {key: num_experts, "num_hidden_layers": num_layers}
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_layer_start_index": 0}))
    said = rf"{key} is {num_experts}: wanted at most {most} in each of {num_layers} layers"
    with pytest.raises(CheckpointError, match=said):
        read_decoder_spec(tmp_path)


def _narrower(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP] = tensors[UP][:, :-1]


def _in_one_expert_more(tensors: dict[str, np.ndarray]) -> None:
    tensors[GATE] = np.concatenate([tensors[GATE], tensors[GATE][:1]])


@pytest.mark.covers("K24", "K28")
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            QWEN3,
            lambda tensors: tensors.pop(UP),
            rf"tensor {UP} is missing: wanted shape \[32, 64\]",
        ),
        (QWEN3, _narrower, rf"tensor {UP} has shape \[32, 63\]: config.json wants \[32, 64\]"),
        (QWEN3, lambda tensors: tensors.pop(GATE), rf"tensor {GATE} is missing"),
        (QWEN3, _in_one_expert_more, rf"tensor {GATE} has shape \[9, 64\]: .* wants \[8, 64\]"),
        (ERNIE, lambda tensors: tensors.pop(BIAS), rf"tensor {BIAS} is missing"),
        (
            ERNIE,
            lambda tensors: tensors.update({BIAS: np.ones((1, 4), np.float32)}),
            rf"tensor {BIAS} has shape \[1, 4\]: config.json wants \[1, 8\]",
        ),
        (
            ERNIE,
            lambda tensors: tensors.pop("model.layers.1.mlp.shared_experts.down_proj.weight"),
            r"shared_experts\.down_proj\.weight is missing: wanted shape \[64, 96\]",
        ),
    ],
)
def test_a_tensor_of_the_mixture_that_is_missing_or_of_another_shape(
    tmp_path: Path, name: str, change: Callable[[dict[str, np.ndarray]], object], said: str
) -> None:
    config = CONFIGS[name]
    write_checkpoint(tmp_path, config)
    tensors = weights_of(config)
    change(tensors)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    _refused(tmp_path, said)


def test_a_layer_without_experts_needs_its_own_mlp(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS[QWEN3])
    config = CONFIGS[QWEN3] | {"mlp_only_layers": [1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _refused(tmp_path, r"tensor model\.layers\.1\.mlp\.gate_proj\.weight is missing")


def test_experts_have_the_numbers_of_their_names(tmp_path: Path) -> None:
    """Also with more than ten, in files that sort names by their letters."""
    config = CONFIGS[QWEN3] | {"num_experts": 12}
    write_checkpoint(tmp_path, config)
    tensors = weights_of(config)
    write_safetensors(tmp_path / "model.safetensors", dict(sorted(tensors.items())))
    checkpoint = Checkpoint(tmp_path, read_decoder_spec(tmp_path))
    for name, wanted in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), wanted, name)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (ERNIE, BIAS),
        (GLM, "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("gpt_oss", "model.layers.1.mlp.router.bias"),
        (GLM, "model.layers.1.input_layernorm.weight"),
    ],
)
def test_what_chooses_experts_has_to_be_finite(
    tmp_path: Path, name: str, tensor: str, number: float
) -> None:
    """Answers would be finite, and of any experts."""
    weights = weights_of(CONFIGS[name])
    weights[tensor.replace(".router.", ".gate.")][..., 0] = number
    write_checkpoint(tmp_path, CONFIGS[name], extra=weights)
    _refused(tmp_path, r"model\.layers\.1\..* has a number that is not finite: wanted finite ones")
