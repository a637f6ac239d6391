"""The decoder in float64 numpy, written from the papers and without a cache: the slow truth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def _norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    scaled: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight
    return scaled


def _frequencies(config: Mapping[str, Any], head_dim: int) -> np.ndarray:
    scaling: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta: float = scaling.get("rope_theta") or config["rope_theta"]
    frequencies = np.array([theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)])
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        frequencies /= scaling["factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        for i, frequency in enumerate(frequencies):
            wavelength = 2 * math.pi / frequency
            if wavelength > original / low:
                frequencies[i] = frequency / factor
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequencies[i] = (1 - smooth) * frequency / factor + smooth * frequency
    return frequencies


def rotate(x: np.ndarray, frequencies: np.ndarray, is_interleaved: bool) -> np.ndarray:
    """Rotate `[heads, positions, head_dim]`; neighbours or halves of a head are the pairs."""
    angles = np.arange(x.shape[1])[:, None] * frequencies
    half = x.shape[2] // 2
    pairs = (x[..., 0::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
    turned = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angles)
    if is_interleaved:
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def causal_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """`[heads, positions, head_dim]` from queries and as many, or fewer, key and value heads."""
    key, value = (np.repeat(x, len(query) // len(x), axis=0) for x in (key, value))
    scores = query @ key.swapaxes(1, 2) / math.sqrt(query.shape[2])
    offset = key.shape[1] - query.shape[1]  # queries are the last positions
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1 + offset)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended: np.ndarray = weights / weights.sum(-1, keepdims=True) @ value
    return attended


def reference_logits(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray], token_ids: list[int]
) -> np.ndarray:
    """Logits `[len(token_ids), vocab_size]` of one sequence."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    epsilon, num_heads = config["rms_norm_eps"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    frequencies = _frequencies(config, head_dim)
    is_interleaved = config["model_type"] == "ernie4_5"
    x = w["model.embed_tokens.weight"][token_ids]

    def linear(values: np.ndarray, name: str) -> np.ndarray:
        return values @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def heads(values: np.ndarray) -> np.ndarray:
        return values.reshape(len(token_ids), -1, head_dim).swapaxes(0, 1)

    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        normed = _norm(x, w[f"{p}input_layernorm.weight"], epsilon)
        q, k, v = (heads(linear(normed, f"{p}self_attn.{n}_proj")) for n in "qkv")
        if config["model_type"] == "qwen3":
            q = _norm(q, w[f"{p}self_attn.q_norm.weight"], epsilon)
            k = _norm(k, w[f"{p}self_attn.k_norm.weight"], epsilon)
        q, k = (rotate(values, frequencies, is_interleaved) for values in (q, k))
        attended = causal_attention(q, k, v).swapaxes(0, 1).reshape(len(token_ids), -1)
        x = x + linear(attended, f"{p}self_attn.o_proj")
        normed = _norm(x, w[f"{p}post_attention_layernorm.weight"], epsilon)
        gate = linear(normed, f"{p}mlp.gate_proj")
        up = linear(normed, f"{p}mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{p}mlp.down_proj")
    x = _norm(x, w["model.norm.weight"], epsilon)
    logits: np.ndarray = x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    return logits
