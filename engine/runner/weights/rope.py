"""Angles of rotary positions."""

from __future__ import annotations

import math

import numpy as np

from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.spec.rope_spec import LongRopeSpec, RopeSpec, YarnSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int, rotated_dim: int = 0) -> np.ndarray:
    """Return radians per position for each of the `head_dim / 2` pairs, float64.

    Only the first `rotated_dim / 2` pairs are rotated (0: all); the others have zeros.
    """
    if rotated_dim:
        return np.pad(inverse_frequencies(rope, rotated_dim), (0, (head_dim - rotated_dim) // 2))
    frequencies: np.ndarray = rope.theta ** -(
        np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    )
    if rope.kind == "none":
        return np.zeros_like(frequencies)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # llama3: short wavelengths stay, long ones are stretched by `factor`, the rest is blended.
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (share + (1.0 - share) / rope.factor)
    if isinstance(rope, LongRopeSpec):
        return frequencies / np.array(rope.factors)
    if isinstance(rope, YarnSpec):
        share = _yarn_share(rope, head_dim)
        return frequencies * (share + (1.0 - share) / rope.factor)
    return frequencies


def _yarn_share(rope: YarnSpec, head_dim: int) -> np.ndarray:
    """Return how much of its frequency each pair keeps, from 1 to 0, falling from pair to pair."""

    def pair_that_turns(times: float) -> float:
        wavelength = rope.original_max_position / times
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.high_freq_factor), pair_that_turns(rope.low_freq_factor)
    if rope.has_whole_bounds:
        first, last = math.floor(first), math.ceil(last)
    # These limits are those of the published code. Where both are one pair, it is the last to stay.
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 1
    return 1.0 - np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)


def rotary_tables(spec: DecoderSpec, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines `[max_len, head_dim / 2]`, float32.

    Those of YaRN and LongRoPE are multiplied by an attention factor, and so are queries and keys by
    them, but for dimensions that are not rotated: their cosines are 1.
    """
    frequencies = inverse_frequencies(spec.rope, spec.head_dim, spec.rotated_dim)
    frequencies = frequencies.astype(np.float32)
    angles = np.arange(max_len, dtype=np.float32)[:, None] * frequencies[None, :]
    cosines, sines = np.cos(angles), np.sin(angles)
    if isinstance(spec.rope, YarnSpec | LongRopeSpec):
        for table in (cosines, sines):
            table[:, : spec.rotated_pairs] *= np.float32(spec.rope.attention_factor)
    return cosines, sines


def head_order(spec: DecoderSpec) -> np.ndarray | None:
    """Return which dimension of a query or key head in the files is each of those computed with.

    There the pairs that are rotated together are (i, i + half), the rotated ones first. In the
    files the first `rotated_dim` dimensions are rotated, as neighbours or as halves of these. None:
    the order is the same.
    """
    size = spec.rotated_dim or spec.head_dim
    rotated, rest = np.arange(size), np.arange(size, spec.head_dim)
    pairs = rotated.reshape(-1, 2).T if spec.is_rope_interleaved else rotated.reshape(2, -1)
    order = np.concatenate([pairs, rest.reshape(2, -1)], axis=1).reshape(-1)
    return None if np.array_equal(order, np.arange(spec.head_dim)) else order
