"""Heads of which a part is rotated: which part, by which angles, and in which order it is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError, ConfigError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.rope import inverse_frequencies, rotary_tables
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from engine.runner.weights.spec.rope_spec import LongRopeSpec
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import CONFIGS, weights_of, write_checkpoint

GLM = CONFIGS["glm"]
PHI = CONFIGS["phi4_mini"]
SHARE = "partial_rotary_factor"
HALVES = [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
"""The order of a head of 32 whose first 16 dimensions are rotated as halves."""
NEIGHBOURS = [*range(0, 16, 2), *range(16, 24), *range(1, 16, 2), *range(24, 32)]
"""The same, where neighbours are rotated."""


def spec_of(folder: Path, config: dict[str, Any]) -> DecoderSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_decoder_spec(folder)


def without_share(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != SHARE}


@pytest.mark.parametrize(
    ("change", "dim"),
    [
        ({}, 16),  # GLM's own share
        ({SHARE: 0.25}, 8),
        ({SHARE: 1.0}, 0),
        ({SHARE: None}, 16),
        ({"rope_parameters": {SHARE: 0.75}}, 24),
        ({"rope_parameters": {SHARE: 0.25}, SHARE: 0.25}, 8),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, SHARE: 0.125}}, 4),
    ],
)
def test_the_share_may_stand_in_several_places(
    tmp_path: Path, change: dict[str, Any], dim: int
) -> None:
    spec = spec_of(tmp_path, without_share(GLM) | change)
    assert spec.rotated_dim == dim
    assert spec.rotated_pairs == (dim or 32) // 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            ({SHARE: share}, (f"{SHARE} is {share!r}", "wanted"))
            for share in (0.3, 0.01, 1.5, 0, -0.5, "0.5", True, [0.5])
        ),
        ({"rope_parameters": {SHARE: 1.25}}, (f"rope_parameters.{SHARE} is 1.25", "of 32, or all")),
        ({SHARE: 0.5, "rope_parameters": {SHARE: 0.25}}, (SHARE, "same wherever it stands")),
    ],
)
def test_a_share_that_is_not_computed_is_named(
    tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as error:
        spec_of(tmp_path, without_share(GLM) | change)
    assert all(word in str(error.value) for word in ("config.json", *words)), str(error.value)


@pytest.mark.parametrize("name", ["llama", "llama_linear", "llama_llama3", "mistral_yarn"])
def test_the_rotated_pairs_turn_like_those_of_a_head_of_their_size(
    tmp_path: Path, name: str
) -> None:
    rope = spec_of(tmp_path, CONFIGS[name]).rope
    found = inverse_frequencies(rope, 64, 24)
    np.testing.assert_array_equal(found[:12], inverse_frequencies(rope, 24))
    np.testing.assert_array_equal(found[12:], np.zeros(20))


def test_the_attention_factor_is_for_rotated_pairs_alone(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, CONFIGS["glm4_yarn"])
    cosines, sines = rotary_tables(spec, 50)
    np.testing.assert_allclose(np.hypot(cosines, sines)[:, :8], 1.1386294, rtol=1e-6)
    np.testing.assert_array_equal(cosines[:, 8:], 1.0)
    np.testing.assert_array_equal(sines[:, 8:], 0.0)


@pytest.mark.parametrize(("name", "order"), [("glm", NEIGHBOURS), ("glm4_moe", HALVES)])
def test_rotated_dimensions_are_read_as_the_first_pairs(
    tmp_path: Path, name: str, order: list[int]
) -> None:
    """Those of weights, of biases, and of norms of heads."""
    folder = write_checkpoint(tmp_path, CONFIGS[name])
    checkpoint = Checkpoint(folder, read_decoder_spec(folder))
    found = 0
    for tensor, values in weights_of(CONFIGS[name]).items():
        if any(part in tensor for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            heads = values.reshape(-1, 32, *values.shape[1:])
            wanted = heads[:, order].reshape(values.shape)
            np.testing.assert_array_equal(checkpoint.read(tensor), wanted, tensor)
            assert not np.array_equal(wanted, values)
            found += 1
        elif "v_proj" in tensor:
            np.testing.assert_array_equal(checkpoint.read(tensor), values, tensor)
    assert found == (8 if name == "glm" else 12)


def test_nodes_that_rotate_other_parts_exchange_no_kv(tmp_path: Path) -> None:
    digests = set()
    for share in (0.25, 0.5, 1.0):
        folder = write_checkpoint(tmp_path, GLM | {SHARE: share})
        digests.add(load(folder).layout.model_digest)
    assert len(digests) == 3


LONGROPE = PHI["rope_scaling"]


def test_longrope_divides_frequencies_by_the_factors_of_short_contexts(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, PHI)
    assert isinstance(spec.rope, LongRopeSpec)
    frequencies = 10000.0 ** -(np.arange(6) / 6)
    wanted = [*(frequencies / LONGROPE["short_factor"]), 0.0, 0.0]
    np.testing.assert_allclose(inverse_frequencies(spec.rope, 16, 12), wanted)
    # The root of 1 + ln 4 / ln 128: the context is four times the original one.
    assert spec.rope.attention_factor == pytest.approx(1.1338934)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({"factor": 16.0}, (1 + 4 / 7) ** 0.5),
        ({"factor": 0.5}, 1.0),
        ({"attention_factor": 1.25}, 1.25),
    ],
)
def test_what_longrope_multiplies_by_may_be_stated(
    tmp_path: Path, change: dict[str, float], factor: float
) -> None:
    rope = spec_of(tmp_path, PHI | {"rope_scaling": LONGROPE | change}).rope
    assert isinstance(rope, LongRopeSpec)
    assert rope.attention_factor == pytest.approx(factor)


def test_longrope_ends_at_the_original_context(tmp_path: Path) -> None:
    """Longer sequences have other frequencies from their first token on."""
    folder = write_checkpoint(tmp_path, PHI)
    assert load(folder).max_model_len == 128
    with pytest.raises(ConfigError, match="129: wanted at most 128, the model's longest context"):
        load(folder, max_model_len=129)


@pytest.mark.parametrize(
    "factors", [None, 1.0, [1.0] * 5, [1.0] * 7, [1.0] * 5 + [0], [1.0] * 5 + ["1"], [True] * 6]
)
def test_factors_of_longrope_that_do_not_fit_are_named(tmp_path: Path, factors: Any) -> None:
    section = LONGROPE | {"short_factor": factors}
    with pytest.raises(
        CheckpointError, match=r"rope_scaling\.short_factor is .*: wanted a list of"
    ):
        spec_of(tmp_path, PHI | {"rope_scaling": section})


def test_other_factors_of_longrope_are_another_model_to_the_nodes(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, PHI)
    other = replace(spec.rope, factors=(*LONGROPE["short_factor"][:5], 3.5))  # type: ignore[call-arg]
    assert replace(spec, rope=other).identity != spec.identity
