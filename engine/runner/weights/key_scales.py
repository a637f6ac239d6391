"""Powers of two by which channels of keys are divided before they are stored in a byte each.

The numbers of a slot share one scale, so one large channel leaves few steps for the others. In
families with biases on their keys some channels are many times larger than the rest. Therefore both
keys of a rotary pair are divided by a power of two that makes the pair about as large as others,
and the queries' are multiplied by it: the product of a query and a key stays the same, to the last
bit. The idea is that of Lin et al., "QServe" (2024), section 4.2, where the factors are measured.
Here a channel's size is computed from its bias and its row of weights, so it is the same for every
token and on every node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.tensor_source import TensorSource


def has_key_scales(spec: DecoderSpec, stored: str) -> bool:
    """Return whether keys are divided before they are stored as `stored`."""
    return stored == "int8" and spec.has_qkv_bias and not spec.has_head_norms


def key_scales(files: TensorSource, prefix: str, spec: DecoderSpec, stored: str) -> np.ndarray:
    """Return the divisors of a layer's keys, `[kv_heads, head_dim / 2]`: one for each rotary pair.

    They are ones where keys are not divided. `prefix` begins the names of the layer's tensors.
    """
    shape = (spec.num_kv_heads, spec.head_dim // 2)
    if not has_key_scales(spec, stored):
        return np.ones(shape, np.float32)
    bias = files.read(f"{prefix}self_attn.k_proj.bias").astype(np.float64)
    weight = files.read(f"{prefix}self_attn.k_proj.weight")
    normed = weight * files.read(f"{prefix}input_layernorm.weight")
    squares = bias**2 + np.square(normed, dtype=np.float64).sum(axis=1)
    sizes = np.sqrt(squares.reshape(spec.num_kv_heads, 2, -1).sum(axis=1))
    usual = np.median(sizes, axis=1, keepdims=True)
    ratios = np.divide(sizes, usual, out=np.ones(shape), where=(sizes > 0) & (usual > 0))
    return np.exp2(np.rint(np.log2(ratios))).astype(np.float32)


def key_scales_digest(files: TensorSource, prefixes: Iterable[str], spec: DecoderSpec) -> str:
    """Return a digest of the divisors of these layers for keys in int8.

    Libraries round in other ways on other processors, so a ratio between two powers of two could
    become either; nodes that differ must not exchange blocks.
    """
    digest = hashlib.sha256()
    for prefix in prefixes:
        digest.update(key_scales(files, prefix, spec, "int8").tobytes())
    return digest.hexdigest()
