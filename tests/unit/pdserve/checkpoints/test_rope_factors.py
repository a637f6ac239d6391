"""Llama 3's scaling of RoPE is recognised from its tensor; anything else is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.model_spec import read_decoder_spec
from engine.runner.weights.rope import inverse_frequencies
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
