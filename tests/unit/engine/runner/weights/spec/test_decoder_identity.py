"""The text of a decoder that is a part of the fingerprint: equal among releases, unlike else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from engine.runner.weights.spec.expert_mixture import ClampedSwish, ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from tests.support.models.tiny_checkpoints import CONFIGS

OF_FORMER_RELEASES = {
    "llama": "dcebe38e5a1eb7a9",
    "llama_tied_biased": "cd523644a41a9512",
    "llama_linear": "ff1cf49350b8b08d",
    "llama_llama3": "b5bc5891482820e2",
    "mistral": "66f423cb4218331f",
    "qwen2": "534a664b50d2794b",
    "mimo": "f09190d53a45a313",
    "qwen3": "9923ca56d0eb9bcf",
    "seed_oss": "cafa5f0221e07f01",
    "ernie": "fb55fe187be0a555",
    "ernie_biased": "a9c9d4faeb14bc07",
}
"""Starts of digests, taken with the release before mixtures of experts were read. Nodes of two
releases exchange KV while a cluster is replaced, so a decoder that both know keeps its text."""
MIXTURES = ("qwen3_moe", "qwen3_moe_mixed", "ernie_moe", "ernie_moe_untied")


def _spec(folder: Path, name: str) -> DecoderSpec:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return read_decoder_spec(folder)


def _another(value: Any) -> Any:
    """Return a value of the type of a field that is not this one."""
    if value is None:
        return ClampedSwish(steepness=1.5, limit=7.0)
    if isinstance(value, bool):
        return not value
    return (*value, 7) if isinstance(value, tuple) else value + (value or 1)


@pytest.mark.parametrize("name", OF_FORMER_RELEASES)
def test_what_a_former_release_knew_keeps_its_digest(tmp_path: Path, name: str) -> None:
    text = _spec(tmp_path, name).identity
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == OF_FORMER_RELEASES[name]


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_that_differ_in_anything_differ(tmp_path: Path, name: str) -> None:
    spec = _spec(tmp_path, name)
    assert spec.experts is not None
    found = {spec.identity, replace(spec, experts=None).identity}
    for field in fields(ExpertMixture):
        changed: dict[str, Any] = {field.name: _another(getattr(spec.experts, field.name))}
        found.add(replace(spec, experts=replace(spec.experts, **changed)).identity)
    assert len(found) == 2 + len(fields(ExpertMixture))


def test_no_two_decoders_of_the_tests_have_one_text(tmp_path: Path) -> None:
    texts = {_spec(tmp_path, name).identity for name in CONFIGS}
    assert len(texts) == len(CONFIGS)
