"""Files that have all experts of a layer in one tensor: the forms of gpt-oss, and a newer one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.decoder_tensors import expected_shapes
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.support.models.fused_experts import in_gpt_oss_form, in_mxfp4_form, in_newer_form
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    prompt_of,
    weights_of,
    write_safetensors,
)
from tests.support.tiny_kin import usual_name

GPT_OSS = CONFIGS["gpt_oss"]
LEFT_ALONE = [
    *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
]
"""What the files of gpt-oss on hubs name."""
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": LEFT_ALONE}
EXPERTS = "model.layers.1.mlp.experts"
GATE_UP = f"{EXPERTS}.gate_up_proj"
Tensors = dict[str, np.ndarray]


def _write(folder: Path, config: Mapping[str, Any], tensors: Tensors, dtype: str = "F32") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    return folder


def _opened(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_decoder_spec(folder))


def _in_mxfp4(folder: Path) -> tuple[Path, Tensors]:
    tensors, values = in_mxfp4_form(weights_of(GPT_OSS))
    return _write(folder, GPT_OSS | {"quantization_config": MXFP4}, tensors), values


def _check_values(folder: Path, values: Tensors) -> Checkpoint:
    """Every tensor of the decoder is there, and has these values.

    Heads of queries and keys may be in another order (`test_rotary_order`).
    """
    checkpoint, spec = _opened(folder), read_decoder_spec(folder)
    shapes = expected_shapes(spec)
    assert sorted(checkpoint.names()) == sorted(shapes)
    for name, shape in shapes.items():
        assert checkpoint.shape(name) == shape
        found = checkpoint.grouped(name)
        assert (found.format, found.shape) == checkpoint.format_and_shape(name)
        assert found.rows.flags.c_contiguous
        if not spec.is_rope_interleaved or not name.endswith(("q_proj.weight", "k_proj.weight")):
            np.testing.assert_array_equal(checkpoint.read(name), values[name], name)
    return checkpoint


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_experts_of_gpt_oss_in_floats(tmp_path: Path, dtype: str) -> None:
    values = weights_of(GPT_OSS)
    folder = _write(tmp_path / "made", GPT_OSS, in_gpt_oss_form(values), dtype)
    for name, one in values.items():
        if dtype == "F16":
            values[name] = one.astype(np.float16).astype(np.float32)
        elif dtype == "BF16":
            values[name] = (one.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    checkpoint = _check_values(folder, values)
    assert checkpoint.format_and_shape(f"{EXPERTS}.7.up_proj.weight") == (dtype, (96, 64))
    assert checkpoint.quantization == ""


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    folder, values = _in_mxfp4(tmp_path / "made")
    checkpoint = _check_values(folder, values)
    for part, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
        form = checkpoint.format_and_shape(f"{EXPERTS}.0.{part}_proj.weight")
        assert form == ("MXFP4", shape)
    assert checkpoint.format_and_shape("model.layers.0.mlp.gate.weight")[0] == "F32"
    assert checkpoint.quantization == "mxfp4"


@pytest.mark.covers("K27")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_mixed", "ernie_moe", "mixtral"])
def test_experts_in_the_newer_form_of_transformers(tmp_path: Path, name: str) -> None:
    values = {usual_name(stored): one for stored, one in weights_of(CONFIGS[name]).items()}
    _check_values(_write(tmp_path / "made", CONFIGS[name], in_newer_form(values)), values)


@pytest.mark.parametrize("inner", [32, 64])  # each makes another tensor square
@pytest.mark.parametrize("is_first", [True, False])
def test_experts_of_models_with_images(tmp_path: Path, inner: int, is_first: bool) -> None:
    """On hubs inputs come first; transformers 5 writes them behind outputs."""
    text = CONFIGS["qwen3_moe"] | {"moe_intermediate_size": inner}
    values = weights_of(text)
    tensors = {}
    for name, one in in_newer_form(values).items():
        stored = one.swapaxes(1, 2) if is_first and ".experts." in name else one
        inside = (
            name.replace("model.", "model.language_model.", 1) if "lm_head" not in name else name
        )
        tensors[inside] = np.ascontiguousarray(stored)
    section = text | {"model_type": "qwen3_vl_moe_text"}
    _check_values(_write(tmp_path / "made", {"text_config": section}, tensors), values)


@pytest.mark.parametrize("backend", ["numba", "paddle"])
def test_mxfp4_and_its_values_in_floats_are_one_model(tmp_path: Path, backend: str) -> None:
    stored, values = _in_mxfp4(tmp_path / "stored")
    wide = _write(tmp_path / "wide", GPT_OSS, in_gpt_oss_form(values))
    prompt = prompt_of(33)
    made = (
        load(folder, activation_dtype="float32", attention_backend=backend)
        for folder in (stored, wide)
    )
    found, wanted = (logits_of(runner, scheduled(prompt, 0, range(10))) for runner in made)
    np.testing.assert_array_equal(found, wanted)
    assert read_decoder_spec(stored) == read_decoder_spec(wide)
    assert _opened(stored).identity() != _opened(wide).identity()


def test_no_more_is_read_than_the_expert_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = _in_mxfp4(tmp_path / "made")
    checkpoint = _opened(folder)
    read: list[int] = []
    from_file = np.fromfile

    def counted(*args: Any, **options: Any) -> np.ndarray:
        found = from_file(*args, **options)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(np, "fromfile", counted)
    for name, num_weights in (("gate_proj", 2 * 96 * 64), ("down_proj", 64 * 96)):
        read.clear()
        checkpoint.grouped(f"{EXPERTS}.3.{name}.weight")
        assert sum(read) == num_weights // 32 * 17
    read.clear()
    checkpoint.grouped(f"{EXPERTS}.3.up_proj.bias")
    assert sum(read) == 2 * 96 * 4


def test_a_layer_that_was_left_alone_is_in_floats(tmp_path: Path) -> None:
    weights = weights_of(GPT_OSS)
    tensors, values = in_mxfp4_form(weights)
    plain = in_gpt_oss_form(weights)
    for part in ("gate_up_proj", "down_proj"):
        name = f"{EXPERTS}.{part}"
        del tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        tensors[name] = plain[name]
    values |= {name: one for name, one in weights.items() if name.startswith(EXPERTS)}
    said = MXFP4 | {"modules_to_not_convert": [*LEFT_ALONE, "model.layers.1.mlp"]}
    config = GPT_OSS | {"quantization_config": said}
    checkpoint = _check_values(_write(tmp_path / "made", config, tensors), values)
    assert checkpoint.format_and_shape(f"{EXPERTS}.0.up_proj.weight")[0] == "F32"
    first = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert checkpoint.format_and_shape(first)[0] == "MXFP4"


def test_a_layer_is_left_alone_by_a_whole_name(tmp_path: Path) -> None:
    """A beginning that ends within a word, or of another layer, is none."""
    tensors, values = in_mxfp4_form(weights_of(GPT_OSS))
    said = MXFP4 | {"modules_to_not_convert": ["model.layers.1.mlp.exp", "layers.11.mlp.experts"]}
    config = GPT_OSS | {"quantization_config": said}
    checkpoint = _check_values(_write(tmp_path / "made", config, tensors), values)
    assert checkpoint.format_and_shape(f"{EXPERTS}.0.up_proj.weight")[0] == "MXFP4"


def _narrower(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_blocks"] = tensors[f"{GATE_UP}_blocks"][:, :-2]


def _one_expert_fewer(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_scales"] = tensors[f"{GATE_UP}_scales"][:-1]


def _in_floats(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_scales"] = tensors[f"{GATE_UP}_scales"].astype(np.float32)


def _twice(tensors: Tensors) -> None:
    tensors[GATE_UP] = np.ones((8, 64, 192), np.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.pop(f"{GATE_UP}_scales"),
            rf"tensor {GATE_UP}_scales is missing: wanted shape \[8, 192, 2\]",
        ),
        (
            lambda tensors: tensors.pop(f"{GATE_UP}_blocks"),
            rf"tensor {GATE_UP}_blocks is missing: wanted shape \[8, 192, 2, 16\]",
        ),
        (
            _narrower,
            rf"{GATE_UP}_blocks has shape \[8, 190, 2, 16\]: config.json wants \[8, 192, 2, 16\]",
        ),
        (_one_expert_fewer, rf"{GATE_UP}_scales has shape \[7, 192, 2\]: .* wants \[8, 192, 2\]"),
        (_in_floats, rf"{GATE_UP}_scales is F32: wanted U8"),
        (_twice, rf"{GATE_UP} is there beside {GATE_UP}_blocks: wanted one"),
        (
            lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_bias"),
            rf"tensor {EXPERTS}\.down_proj_bias is missing: wanted shape \[8, 64\]",
        ),
        (
            lambda tensors: tensors.pop(f"{GATE_UP}_bias"),
            rf"tensor {GATE_UP}_bias is missing: wanted shape \[8, 192\]",
        ),
        (
            lambda tensors: tensors.pop("model.layers.0.mlp.router.bias"),
            r"tensor model\.layers\.0\.mlp\.gate\.bias is missing",
        ),
        (
            lambda tensors: tensors.pop("model.layers.0.self_attn.sinks"),
            r"tensor model\.layers\.0\.self_attn\.sinks is missing: wanted shape \[4\]",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape(
    tmp_path: Path, change: Callable[[Tensors], object], said: str
) -> None:
    tensors, _ = in_mxfp4_form(weights_of(GPT_OSS))
    change(tensors)
    folder = _write(tmp_path / "made", GPT_OSS | {"quantization_config": MXFP4}, tensors)
    with pytest.raises(CheckpointError, match=said):
        _opened(folder)


def test_a_scale_that_is_nan_is_refused_with_its_expert(tmp_path: Path) -> None:
    tensors, _ = in_mxfp4_form(weights_of(GPT_OSS))
    tensors[f"{GATE_UP}_scales"][5, 3, 1] = 255  # a row of up
    folder = _write(tmp_path / "made", GPT_OSS | {"quantization_config": MXFP4}, tensors)
    checkpoint = _opened(folder)
    checkpoint.read(f"{EXPERTS}.5.gate_proj.weight")
    said = rf"{GATE_UP}_scales has a scale that is NaN, 255, in expert 5"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.read(f"{EXPERTS}.5.up_proj.weight")


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (None, rf"{GATE_UP}_blocks is there, and quantization_config .* wanted {GATE_UP}"),
        (
            MXFP4 | {"modules_to_not_convert": [r"model\.layers\.1\.mlp\.experts"]},
            rf"{GATE_UP}_blocks is there, and quantization_config .* wanted {GATE_UP}",
        ),
        (
            MXFP4 | {"modules_to_not_convert": ["layers.1.mlp.experts"]},
            rf"{GATE_UP}_blocks is there, and quantization_config",
        ),
        (MXFP4 | {"modules_to_not_convert": "lm_head"}, r"modules_to_not_convert is 'lm_head'"),
        (MXFP4 | {"modules_to_not_convert": ["("]}, r"modules_to_not_convert is \['\('\]"),
        (MXFP4 | {"group_size": 16}, r"quantization_config\.group_size is 16: wanted no key"),
        (MXFP4 | {"dequantize": "no"}, r"dequantize is 'no': wanted true or false"),
        ({"quant_method": "mxfp8"}, r"quant_method is 'mxfp8': wanted one of"),
    ],
)
def test_what_config_json_says_otherwise(
    tmp_path: Path, said: dict[str, Any] | None, wanted: str
) -> None:
    tensors, _ = in_mxfp4_form(weights_of(GPT_OSS))
    if said is None or said.get("modules_to_not_convert"):
        for part in ("gate_up_proj", "down_proj"):  # the first layer is as it is wanted
            for suffix in ("_blocks", "_scales"):
                del tensors[f"model.layers.0.mlp.experts.{part}{suffix}"]
        plain = in_gpt_oss_form(weights_of(GPT_OSS))
        tensors |= {name: one for name, one in plain.items() if ".0.mlp.experts." in name}
    folder = _write(tmp_path / "made", GPT_OSS | {"quantization_config": said}, tensors)
    with pytest.raises(CheckpointError, match=wanted):
        _opened(folder)


def test_other_families_in_mxfp4_are_refused(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"] | {"quantization_config": MXFP4}
    folder = _write(tmp_path / "made", config, weights_of(CONFIGS["qwen3_moe"]))
    with pytest.raises(CheckpointError, match="quant_method is 'mxfp4': wanted it of experts of"):
        _opened(folder)


def test_inputs_that_are_no_whole_groups(tmp_path: Path) -> None:
    config = GPT_OSS | {"intermediate_size": 80}
    tensors, _ = in_mxfp4_form(weights_of(GPT_OSS))
    for name, one in tensors.items():
        if "gate_up_proj" in name:
            tensors[name] = one[:, :160]
    folder = _write(tmp_path / "made", config | {"quantization_config": MXFP4}, tensors)
    with pytest.raises(CheckpointError, match=r"down_proj_blocks is of weights with 80 inputs"):
        _opened(folder)


@pytest.mark.covers("K27")
def test_experts_that_are_quantised_otherwise_have_a_tensor_each(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"] | {"quantization_config": {"quant_method": "fp8"}}
    folder = _write(tmp_path / "made", config, in_newer_form(weights_of(CONFIGS["qwen3_moe"])))
    with pytest.raises(CheckpointError, match="holds all experts of a layer: wanted a tensor for"):
        _opened(folder)
