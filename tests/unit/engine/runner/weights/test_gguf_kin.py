"""GGUF files of families that are kin of Llama and Qwen give the decoder of their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from common.files.model_config import longest_context
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.config_values import read_json_object
from engine.runner.weights.spec.model_spec import read_decoder_spec
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint
from tests.support.models.tiny_gguf import write_gguf

SECTIONS = {"qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl"}


def _made(folder: Path, name: str, metadata: dict[str, Any] | None = None) -> Path:
    write_gguf(folder / "model.gguf", CONFIGS[name], {}, metadata)
    made = folder / "made"
    made.mkdir()
    make_gguf_folder(folder / "model.gguf", made)
    return made


@pytest.mark.parametrize("name", ["mixtral", "granite", "ministral3", *SECTIONS])
def test_the_decoder_and_all_values_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    made = _made(tmp_path, name)
    folder = write_checkpoint(tmp_path / "folder", CONFIGS[name])
    spec = read_decoder_spec(folder)
    assert read_decoder_spec(made) == spec
    found, wanted = (Checkpoint(one, spec) for one in (made, folder))
    assert sorted(found.names()) == sorted(wanted.names())
    for tensor in wanted.names():
        np.testing.assert_array_equal(found.read(tensor), wanted.read(tensor), tensor)


@pytest.mark.parametrize(("name", "family"), SECTIONS.items())
def test_sections_of_positions_change_nothing(tmp_path: Path, name: str, family: str) -> None:
    made = _made(tmp_path, name, {f"{family}.rope.dimension_sections": [2, 3, 3, 0]})
    assert read_decoder_spec(made).rope.kind == "default"


def test_multipliers_that_a_file_leaves_out_are_those_of_llama_cpp(tmp_path: Path) -> None:
    left_out = dict.fromkeys(("embedding_scale", "residual_scale"), None)
    metadata = {f"granite.{key}": value for key, value in left_out.items()}
    spec = read_decoder_spec(
        _made(tmp_path, "granite", metadata | {"granite.attention.scale": 0.0})
    )
    assert (spec.embedding_scale, spec.rms_epsilon) == (1.0, 1e-5)
    assert spec.score_scale == pytest.approx(0.25)  # the root of a head of 16
    assert spec.logits_divisor == 2.0


def test_the_context_of_ministral_ends_where_queries_begin_to_grow(tmp_path: Path) -> None:
    config = read_json_object(_made(tmp_path, "ministral3") / "config.json")
    assert longest_context(config) == 128


@pytest.mark.parametrize(
    ("name", "metadata", "said"),
    [
        ("granite", {"granite.logit_scale": None}, "granite.logit_scale is missing"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "wanted heads that are rotated"),
        ("granite", {"granite.residual_scale": -1.0}, "residual_multiplier is -1.0: wanted"),
        ("mixtral", {"llama.expert_used_count": 9}, "is 9: wanted at most 8, expert_count"),
        ("mixtral", {"llama.expert_weights_norm": False}, "expert_weights_norm is False: wanted"),
        ("mixtral", {"llama.expert_feed_forward_length": 32}, "is 32: wanted feed_forward_length"),
        (
            "ministral3",
            {"mistral3.rope.scaling.type": "linear", "mistral3.rope.scaling.yarn_beta_fast": None},
            "temperature_scale is 0.1: wanted it with yarn alone",
        ),
        ("ministral3", {"mistral3.attention.temperature_length": 64}, "length is 64: wanted 128"),
    ],
)
def test_what_cannot_be_is_named(
    tmp_path: Path, name: str, metadata: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        _made(tmp_path, name, metadata)
