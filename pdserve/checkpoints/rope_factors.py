"""Scaled RoPE of a GGUF file of the `llama` architecture: the tensor `rope_freqs.weight`.

It holds what each rotation frequency is divided by, which Hugging Face computes from a few numbers
in config.json. The factors are recognised when those numbers give them back.
"""

from __future__ import annotations

import math
from typing import Any

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile
from engine.runner.weights.gguf_weights import ROPE_FACTORS_TENSOR

# Llama 3.1 and later.
_LOW_FREQ_FACTOR = 1.0
_HIGH_FREQ_FACTOR = 4.0
_ORIGINAL_MAX_POSITIONS = 8192

# The tensor was computed in float32, by the program that wrote the file.
_RELATIVE_TOLERANCE = 1e-4


def llama3_scaling_factor(gguf: GgufFile, head_dim: int, rope_theta: float) -> float | None:
    """Return the `factor` of Llama 3's scaling, None where the file has no such tensor.

    Raises CheckpointError when the tensor is anything but that scaling.
    """
    tensor = gguf.tensors.get(ROPE_FACTORS_TENSOR)
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{gguf.path}: tensor {ROPE_FACTORS_TENSOR} has shape {tensor.shape}: "
            f"wanted {(head_dim // 2,)}"
        )
    stored = [float(value) for value in tensor.dequantised()]
    factor = max(stored)
    if 1.0 < factor < math.inf and all(
        math.isclose(found, wanted, rel_tol=_RELATIVE_TOLERANCE)
        for found, wanted in zip(stored, _llama3_factors(factor, head_dim, rope_theta), strict=True)
    ):
        return factor
    raise CheckpointError(
        f"{gguf.path}: tensor {ROPE_FACTORS_TENSOR} holds {min(stored):g} to {factor:g}, which is "
        f"not Llama 3's scaling of RoPE: supported is that, for a context of first "
        f"{_ORIGINAL_MAX_POSITIONS} tokens and a factor above 1"
    )


def rope_scaling(factor: float) -> dict[str, Any]:
    """Return `rope_scaling` of config.json."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_MAX_POSITIONS,
    }


def _llama3_factors(factor: float, head_dim: int, rope_theta: float) -> list[float]:
    """Return what the frequency of each of the `head_dim / 2` pairs is divided by.

    Short wavelengths stay, long ones are stretched by `factor`, those between are blended.
    """
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope_theta ** (2 * pair / head_dim)
        turns = _ORIGINAL_MAX_POSITIONS / wavelength
        share = (turns - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
        share = min(max(share, 0.0), 1.0)
        factors.append(1.0 / (share + (1.0 - share) / factor))
    return factors
