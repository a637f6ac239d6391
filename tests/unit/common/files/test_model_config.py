"""The longest context as config.json has it, also where nodes refuse the file."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.files.model_config import longest_context, text_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
OLDER = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 32.0}
BESIDE = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.covers("K19")
@pytest.mark.parametrize(
    ("change", "longest"),
    [
        ({}, 40960),
        ({"rope_scaling": None}, 40960),
        ({"rope_scaling": YARN}, 131072),
        ({"rope_scaling": OLDER}, 131072),
        ({"rope_parameters": YARN}, 131072),
        ({"rope_parameters": None, "rope_scaling": YARN}, 131072),
        ({"rope_scaling": BESIDE, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_scaling": YARN, "max_position_embeddings": 131072}, 131072),
        ({"rope_scaling": YARN, "max_position_embeddings": 200000}, 200000),
        ({"rope_scaling": LINEAR}, 40960),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": LINEAR}}, 131072),
        ({"rope_scaling": LONGROPE}, 4096),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 8192}, 8192),
        ({"rope_scaling": {"type": "longrope"}}, 40960),
        ({"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}, 32768),
        ({"rope_parameters": YARN | {"llama_4_scaling_beta": 0}}, 131072),
        ({"rope_parameters": YARN | {"llama_4_scaling_beta": "0.1"}}, 131072),
        ({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": YARN}}, 40960),
    ],
)
def test_the_longest_context(change: dict[str, Any], longest: int) -> None:
    assert longest_context({"max_position_embeddings": 40960} | change) == longest


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", ["4", None, True, math.nan, math.inf, -1, 0, 10**400, [4.0], {}])
def test_values_that_nodes_refuse_change_nothing(key: str, value: object) -> None:
    config = {"max_position_embeddings": 40960, "rope_scaling": YARN | {key: value}}
    assert longest_context(config) == 40960


@pytest.mark.parametrize(
    "section", ["yarn", ["yarn"], {"rope_type": ["yarn"]}, {}, {"full_attention": 5}]
)
def test_a_section_that_is_none(section: object) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        assert longest_context({"max_position_embeddings": 40960, key: section}) == 40960


GPT_OSS = {"architectures": ["GptOssForCausalLM"], "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("change", "longest"),
    [
        ({}, 131072),
        ({"rope_scaling": None}, 131072),
        ({"rope_parameters": {}, "rope_scaling": {}}, 131072),
        ({"rope_scaling": YARN | {"factor": 2.0}}, 65536),
        ({"rope_parameters": {"rope_type": "default"}}, 4096),
    ],
)
def test_gpt_oss_is_scaled_unless_its_file_says_otherwise(
    change: dict[str, Any], longest: int
) -> None:
    assert longest_context(text_config(GPT_OSS | change)) == longest


@pytest.mark.parametrize("value", [None, [], ["gemma3_text"], {}, 5, math.nan])
def test_kinds_of_models_that_are_none(value: object) -> None:
    for config in (
        {"text_config": {"model_type": value}},
        {"text_config": value},
        {"architectures": value},
        {"architectures": [value]},
    ):
        assert text_config(config) == config
