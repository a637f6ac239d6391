"""Models with images: their text model is served, under the names of older and newer files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec, read_eos_token_ids
from tests.support.models.hub_formats import PACKERS, pack_folder
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    prompt_of,
    weights_of,
    write_checkpoint,
    write_safetensors,
)

Rename = Callable[[str], str]
VISION = {"vision_tower.encoder.weight": np.ones((4, 4), np.float32)}
OUTER: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 3],
        "vision_config": {"hidden_size": 4},
    },
    "mistral_window": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "vision_config": {"hidden_size": 4},
    },
    "ministral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "vision_config": {"hidden_size": 4},
    },
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "vision_config": {"hidden_size": 4},
    },
}


def _older(name: str) -> str:
    return f"language_model.{name}"


def _newer(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name[:6] == "model." else name


def _write(folder: Path, family: str, rename: Rename) -> Path:
    """A folder of a model with images, whose text model is that of `family`."""
    config = {key: value for key, value in CONFIGS[family].items() if key != "architectures"}
    inner = {**config, "eos_token_id": None}
    outer = OUTER[family] | {"text_config": inner}
    write_checkpoint(folder, CONFIGS[family])
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = {rename(name): one for name, one in weights_of(CONFIGS[family]).items()}
    write_safetensors(folder / "model.safetensors", VISION | tensors)
    return folder


@pytest.mark.parametrize("rename", [_older, _newer])
@pytest.mark.parametrize("family", OUTER)
def test_the_text_model_answers_as_it_does_alone(
    tmp_path: Path, family: str, rename: Rename
) -> None:
    alone = write_checkpoint(tmp_path / "alone", CONFIGS[family])
    folder = _write(tmp_path / "within", family, rename)
    assert read_decoder_spec(folder) == read_decoder_spec(alone)
    checkpoint = Checkpoint(folder, read_decoder_spec(folder))
    assert sorted(checkpoint.names()) == sorted(weights_of(CONFIGS[family]))
    found, wanted = (
        logits_of(load(one), scheduled(prompt_of(40), 0, range(4))) for one in (folder, alone)
    )
    np.testing.assert_array_equal(found, wanted)


def test_keys_beside_the_text_models_count_where_it_has_none(tmp_path: Path) -> None:
    folder = _write(tmp_path, "gemma3", _older)
    (folder / "generation_config.json").unlink()
    assert read_eos_token_ids(folder) == {1, 3}


def test_what_gemma_leaves_out_is_that_of_its_first_model(tmp_path: Path) -> None:
    """The file of the model of 4B says no more of its text model than this."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(OUTER["gemma3"] | {"text_config": text}))
    spec = read_decoder_spec(tmp_path)
    assert (spec.architecture, spec.vocab_size) == ("Gemma3ForCausalLM", 262208)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.max_position, spec.has_tied_embeddings) == (131072, True)
    assert spec.windows[:6] == (1024,) * 5 + (0,)
    assert (spec.rope.kind, spec.rope.factor) == ("linear", 8.0)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_whole_model_says_whether_embeddings_are_tied(tmp_path: Path, is_tied: bool) -> None:
    text = CONFIGS["qwen3_vl"] | {"tie_word_embeddings": not is_tied}
    outer = OUTER["qwen3_vl"] | {"tie_word_embeddings": is_tied, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert read_decoder_spec(tmp_path).has_tied_embeddings == is_tied


def test_what_qwen_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}
    found = {}
    for kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        text = sizes | {"model_type": f"{kind}_text"}
        (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
        found[kind] = read_decoder_spec(tmp_path)
    assert [spec.rope.theta for spec in found.values()] == [1e6, 5e5, 5e5]
    assert [spec.rms_epsilon for spec in found.values()] == [1e-5, 1e-6, 1e-6]
    assert [spec.num_heads for spec in found.values()] == [64, 32, 16]
    assert [spec.max_position for spec in found.values()] == [32768, 128000, 128000]
    experts = found["qwen3_vl_moe"].experts
    assert experts is not None
    assert (experts.num_experts, experts.num_chosen, experts.is_normalised) == (60, 4, True)


def test_a_text_model_that_is_quantised(tmp_path: Path) -> None:
    config = CONFIGS["mistral_window"] | {"hidden_size": 128, "intermediate_size": 256}
    values = pack_folder(tmp_path, config, weights_of(config), PACKERS["awq"])
    plain = Checkpoint(tmp_path, read_decoder_spec(tmp_path))
    before = {name: plain.read(name) for name in values}
    stored = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quantization_config": stored.pop("quantization_config")}
    del stored["architectures"]
    outer = OUTER["mistral_window"] | quantization | {"text_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    (file,) = tmp_path.glob("*.safetensors")
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = {
        name if name == "__metadata__" else _older(name): one
        for name, one in json.loads(raw[8 : 8 + size]).items()
    }
    packed = json.dumps(header).encode()
    file.write_bytes(len(packed).to_bytes(8, "little") + packed + raw[8 + size :])
    within = Checkpoint(tmp_path, read_decoder_spec(tmp_path))
    for name, wanted in before.items():
        np.testing.assert_array_equal(within.read(name), wanted)


def test_other_text_models_and_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = _write(tmp_path, "gemma3", _newer)
    config = json.loads((folder / "config.json").read_text())
    other = config | {"text_config": config["text_config"] | {"model_type": "qwen2_vl_text"}}
    (folder / "config.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match=r"architectures is \['Gemma3ForConditional"):
        read_decoder_spec(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {_newer(name): one for name, one in weights_of(CONFIGS["gemma3"]).items()}
    missing = "model.language_model.layers.1.mlp.up_proj.weight"
    del tensors[missing]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=missing):
        Checkpoint(folder, read_decoder_spec(folder))
