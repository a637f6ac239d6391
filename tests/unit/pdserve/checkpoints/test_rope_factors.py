"""Scaling of RoPE: Llama 3's is recognised from its tensor, others are read from keys."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.rope import inverse_frequencies
from engine.runner.weights.spec.model_spec import read_decoder_spec
from pdserve.checkpoints.gguf_folder import make_gguf_folder

WriteGguf = Callable[..., Path]

HEAD_DIM = 16
# The base of Llama 3; one wavelength of such a head lies between 2048 and 8192 positions.
METADATA = {"llama.attention.key_length": HEAD_DIM, "llama.rope.freq_base": 500000.0}
LAYERS = {
    f"blk.{layer}.{part}.weight": np.zeros(shape, np.float32)
    for layer in range(2)
    for part, shape in (
        ("attn_q", (4 * HEAD_DIM, 32)),
        ("attn_k", (2 * HEAD_DIM, 32)),
        ("attn_v", (2 * HEAD_DIM, 32)),
        ("attn_output", (32, 4 * HEAD_DIM)),
    )
}


KEYS = "llama.rope.scaling"
YARN = {
    f"{KEYS}.type": "yarn",
    f"{KEYS}.factor": 4.0,
    f"{KEYS}.original_context_length": 8192,
}
IN_CONFIG = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def published_factors(factor: float, context: int = 8192) -> np.ndarray:
    """Meta's formula step by step, in float32, as files are written."""
    factors = []
    for frequency in 500000.0 ** -(np.arange(0, HEAD_DIM, 2, dtype=np.float32) / HEAD_DIM):
        wavelength = 2 * np.pi / frequency
        if wavelength < context / 4:
            factors.append(1.0)
        elif wavelength > context / 1:
            factors.append(factor)
        else:
            smooth = (context / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def folder_of(write_gguf: WriteGguf, folder: Path, factors: np.ndarray) -> Path:
    path = write_gguf(METADATA, {**LAYERS, "rope_freqs.weight": factors})
    folder.mkdir()
    make_gguf_folder(path, folder)
    return folder


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_goes_into_the_config(
    write_gguf: WriteGguf, tmp_path: Path, factor: float
) -> None:
    factors = published_factors(factor)
    assert factors[0] == 1.0
    assert any(1.0 < value < factor for value in factors)
    folder = folder_of(write_gguf, tmp_path / "hf", factors)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    Checkpoint(folder, read_decoder_spec(folder))  # the factors are no unknown tensor
    unscaled = 500000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    computed = inverse_frequencies(read_decoder_spec(folder).rope, HEAD_DIM)
    np.testing.assert_allclose(computed, unscaled / factors, rtol=1e-5)


@pytest.mark.parametrize(
    ("factors", "wanted"),
    [
        (published_factors(8.0, context=4096), "holds 1 to 8, which is not Llama 3's scaling"),
        (np.full(8, 8.0, np.float32), "holds 8 to 8, which is not Llama 3's scaling"),
        (np.full(8, np.nan, np.float32), "not Llama 3's scaling"),
        (np.full(8, np.inf, np.float32), "not Llama 3's scaling"),
        (np.ones(8, np.float32), "a factor above 1"),
        (np.ones(4, np.float32), r"shape \(4,\): wanted \(8,\)"),
    ],
)
def test_other_factors_are_named(
    write_gguf: WriteGguf, tmp_path: Path, factors: np.ndarray, wanted: str
) -> None:
    with pytest.raises(CheckpointError, match=wanted):
        folder_of(write_gguf, tmp_path / "hf", factors)


def scaling_of(write_gguf: WriteGguf, folder: Path, keys: dict[str, Any]) -> Any:
    """`rope_scaling` of the folder's config.json, None without."""
    folder.mkdir()
    make_gguf_folder(write_gguf(keys), folder)
    return json.loads((folder / "config.json").read_text()).get("rope_scaling")


@pytest.mark.covers("K21")
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, None),
        ({f"{KEYS}.type": "none"}, None),
        ({f"{KEYS}.type": "none", f"{KEYS}.factor": 4.0}, None),
        ({f"{KEYS}.factor": 1.0}, None),
        ({f"{KEYS}.factor": 0.0}, None),
        ({f"{KEYS}.attn_factor": 1.0, f"{KEYS}.finetuned": False}, None),
        ({f"{KEYS}.type": "linear"}, None),
        ({f"{KEYS}.type": "linear", f"{KEYS}.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({f"{KEYS}.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (YARN, IN_CONFIG),
        (YARN | {f"{KEYS}.factor": 1.3}, IN_CONFIG | {"factor": 1.3}),
        (YARN | {f"{KEYS}.finetuned": True, f"{KEYS}.yarn_ext_factor": 1.0}, IN_CONFIG),
        (YARN | {f"{KEYS}.yarn_log_multiplier": 0.0}, IN_CONFIG),
        (
            YARN | {f"{KEYS}.yarn_beta_fast": 16.0, f"{KEYS}.yarn_beta_slow": 0.1},
            IN_CONFIG | {"beta_fast": 16.0, "beta_slow": 0.1},
        ),
        (
            YARN | {f"{KEYS}.yarn_log_multiplier": 1.0},
            IN_CONFIG | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    ],
)
def test_keys_go_into_the_config(
    write_gguf: WriteGguf, tmp_path: Path, keys: dict[str, Any], wanted: Any
) -> None:
    assert scaling_of(write_gguf, tmp_path / "hf", keys) == wanted


@pytest.mark.covers("K19")
def test_the_context_of_yarn_is_the_extended_one(write_gguf: WriteGguf, tmp_path: Path) -> None:
    keys = YARN | {"llama.context_length": 8192}
    assert scaling_of(write_gguf, tmp_path / "hf", keys) == IN_CONFIG
    assert read_decoder_spec(tmp_path / "hf").max_position == 32768
    tokenizer = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == 32768


@pytest.mark.covers("K21")
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({f"{KEYS}.type": "longrope"}, "scaling.type is 'longrope': wanted none, linear or yarn"),
        ({f"{KEYS}.factor": None}, "scaling.factor is missing"),
        ({f"{KEYS}.factor": 0.5}, "scaling.factor is 0.5: wanted at least 1"),
        ({f"{KEYS}.factor": np.nan}, "scaling.factor is nan"),
        ({f"{KEYS}.factor": "4"}, "scaling.factor is '4'"),
        ({f"{KEYS}.original_context_length": None}, "original_context_length is missing"),
        ({f"{KEYS}.original_context_length": 0}, "original_context_length is 0: wanted at least 1"),
        ({f"{KEYS}.yarn_beta_fast": 0.5}, "beta_fast is 0.5: wanted more than beta_slow, 1"),
        ({f"{KEYS}.yarn_beta_slow": -1.0}, "beta_slow is -1.0: wanted a number above 0"),
        ({f"{KEYS}.yarn_attn_factor": 1.0}, "yarn_attn_factor: wanted no such key"),
        ({f"{KEYS}.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5: wanted 1"),
        ({f"{KEYS}.attn_factor": 1.2}, "attn_factor is 1.2: wanted 1"),
        ({f"{KEYS}.type": None, f"{KEYS}.attn_factor": 1.2}, "attn_factor is 1.2: wanted 1"),
        ({f"{KEYS}.type": "linear", f"{KEYS}.factor": -2.0}, "factor is -2: wanted at least 1"),
    ],
)
def test_keys_that_are_not_computed_are_named(
    write_gguf: WriteGguf, tmp_path: Path, change: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(CheckpointError, match=wanted):
        scaling_of(write_gguf, tmp_path / "hf", YARN | change)


def test_a_tensor_and_keys_are_two_scalings(write_gguf: WriteGguf, tmp_path: Path) -> None:
    keys = METADATA | YARN
    path = write_gguf(keys, {**LAYERS, "rope_freqs.weight": published_factors(8.0)})
    (tmp_path / "hf").mkdir()
    with pytest.raises(CheckpointError, match="which is 'yarn': wanted one of them"):
        make_gguf_folder(path, tmp_path / "hf")
