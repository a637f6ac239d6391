"""Angles of rotary positions."""

from __future__ import annotations

import math

import numpy as np

from engine.runner.weights.model_spec import DecoderSpec, RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Return radians per position for each of the `head_dim / 2` pairs, float64."""
    frequencies: np.ndarray = rope.theta ** -(
        np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    )
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # llama3: short wavelengths stay, long ones are stretched by `factor`, the rest is blended.
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (share + (1.0 - share) / rope.factor)
    return frequencies


def rotary_tables(spec: DecoderSpec, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines `[max_len, head_dim / 2]`, float32."""
    frequencies = inverse_frequencies(spec.rope, spec.head_dim).astype(np.float32)
    angles = np.arange(max_len, dtype=np.float32)[:, None] * frequencies[None, :]
    return np.cos(angles), np.sin(angles)


def halves_first(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder outputs so that neighbours (2i, 2i + 1) become pairs (i, i + half) of each head.

    Query and key heads are only ever multiplied with each other, so reordering both the same way
    changes no score, and one rotation serves every family.
    """
    paired = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(weight.shape)
