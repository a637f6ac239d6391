"""Scaled RoPE of a GGUF file: keys of its metadata, or tensors.

LongRoPE has two tensors of factors. `rope_freqs.weight`, of the `llama` architecture, holds what
each rotation frequency is divided by, which Hugging Face computes from a few numbers in
config.json. The factors are recognised when those numbers give them back.
"""

from __future__ import annotations

import math
from typing import Any

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile
from engine.runner.weights.gguf_weights import LONG_ROPE_TENSORS, ROPE_FACTORS_TENSOR

# Llama 3.1 and later.
_LOW_FREQ_FACTOR = 1.0
_HIGH_FREQ_FACTOR = 4.0
_ORIGINAL_MAX_POSITIONS = 8192

# The tensor was computed in float32, by the program that wrote the file.
_RELATIVE_TOLERANCE = 1e-4


def rope_scaling(gguf: GgufFile, family: str, head_dim: int, rope_theta: float) -> dict[str, Any]:
    """Return `rope_scaling` of config.json, empty where the file of `family` scales nothing.

    `head_dim` dimensions of a head are rotated.

    Raises CheckpointError for a scaling that is not computed.
    """
    if any(name in gguf.tensors for name in LONG_ROPE_TENSORS):
        return _long_rope(gguf, family, head_dim // 2)
    scaling = _scaling_of_keys(gguf, f"{family}.rope")
    factor = _llama3_scaling_factor(gguf, head_dim, rope_theta)
    if factor is None:
        return scaling | _growth(gguf, family, scaling)
    if scaling:
        raise CheckpointError(
            f"{gguf.path}: RoPE is scaled by the tensor {ROPE_FACTORS_TENSOR} and by "
            f"{family}.rope.scaling.type, which is {scaling['rope_type']!r}: wanted one of them"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_MAX_POSITIONS,
    }


def _long_rope(gguf: GgufFile, family: str, num_pairs: int) -> dict[str, Any]:
    """Return LongRoPE, whose factors of pairs are tensors; those of short contexts are used.

    The attention factor is left out where it is what config.json's other numbers give.
    """
    prefix = f"{family}.rope.scaling"
    found: dict[str, list[float]] = {}
    for name in LONG_ROPE_TENSORS:
        tensor = gguf.tensors.get(name)
        if tensor is None or tensor.shape != (num_pairs,):
            shape = "missing" if tensor is None else f"of shape {tensor.shape}"
            raise CheckpointError(f"{gguf.path}: tensor {name} is {shape}: wanted {(num_pairs,)}")
        found[name] = [_as_meant(float(value)) for value in tensor.dequantised()]
    kind = gguf.text(f"{prefix}.type", "longrope")
    if kind != "longrope":
        raise CheckpointError(f"{gguf.path}: {prefix}.type is {kind!r}: wanted longrope")
    short, long = (found[name] for name in LONG_ROPE_TENSORS)
    original = gguf.integer(f"{prefix}.original_context_length")
    if original < 2:
        raise CheckpointError(
            f"{gguf.path}: {prefix}.original_context_length is {original}: wanted at least 2"
        )
    growth = max(gguf.integer(f"{family}.context_length") / original, 1.0)
    usual = math.sqrt(1.0 + math.log(growth) / math.log(original))
    attention_factor = _as_meant(gguf.number(f"{prefix}.attn_factor", 1.0))
    is_usual = math.isclose(attention_factor, usual, rel_tol=1e-6)
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        **({} if is_usual else {"attention_factor": attention_factor}),
    }


def _scaling_of_keys(gguf: GgufFile, prefix: str) -> dict[str, Any]:
    """Return what the keys below `prefix` say, as llama.cpp reads them.

    A factor without a type is linear, and `scale_linear` is its older name; 0 is none.
    """
    kind = gguf.text(f"{prefix}.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{gguf.path}: {prefix}.scaling.type is {kind!r}: wanted none, linear or yarn"
        )
    _refuse_others(gguf, f"{prefix}.scaling", kind)
    key = f"{prefix}.scaling.factor"
    if key not in gguf.metadata and f"{prefix}.scale_linear" in gguf.metadata:
        key = f"{prefix}.scale_linear"
    factor = _as_meant(gguf.number(key, None if kind == "yarn" else 0.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {}
    if factor < 1:
        raise CheckpointError(f"{gguf.path}: {key} is {factor:g}: wanted at least 1")
    yarn = _yarn(gguf, f"{prefix}.scaling") if kind == "yarn" else {}
    return {"rope_type": kind, "factor": factor, **yarn}


def _growth(gguf: GgufFile, family: str, scaling: dict[str, Any]) -> dict[str, float]:
    """Return by what Mistral's later queries grow, which ends a context; 0, or no key, is none."""
    key = f"{family}.attention.temperature_scale"
    growth = _as_meant(gguf.number(key, 0.0))
    if not growth:
        return {}
    if scaling.get("rope_type") != "yarn":
        raise CheckpointError(f"{gguf.path}: {key} is {growth:g}: wanted it with yarn alone")
    original = scaling["original_max_position_embeddings"]
    length = f"{family}.attention.temperature_length"
    if (found := gguf.integer(length, original)) not in (0, original):
        raise CheckpointError(f"{gguf.path}: {length} is {found}: wanted {original}")
    return {"llama_4_scaling_beta": growth}


def _yarn(gguf: GgufFile, prefix: str) -> dict[str, Any]:
    """Return YaRN's numbers beside its factor."""
    key = f"{prefix}.original_context_length"
    original = gguf.integer(key)
    if original < 1:
        raise CheckpointError(f"{gguf.path}: {key} is {original}: wanted at least 1")
    found: dict[str, Any] = {"original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if f"{prefix}.yarn_{name}" in gguf.metadata:
            found[name] = _as_meant(gguf.number(f"{prefix}.yarn_{name}"))
    share = _as_meant(gguf.number(f"{prefix}.yarn_log_multiplier", 0.0))
    return {**found, "mscale": 1.0, "mscale_all_dim": share} if share else found


def _refuse_others(gguf: GgufFile, prefix: str, kind: str) -> None:
    """Raise CheckpointError for keys that are not computed, unless they change nothing.

    `yarn_attn_factor` is refused whatever it is: what writes it means the whole attention factor,
    what reads it a part of that.
    """
    if kind == "yarn" and f"{prefix}.yarn_attn_factor" in gguf.metadata:
        raise CheckpointError(f"{gguf.path}: {prefix}.yarn_attn_factor: wanted no such key")
    for name in ("attn_factor", "yarn_ext_factor") if kind == "yarn" else ("attn_factor",):
        value = gguf.number(f"{prefix}.{name}", 1.0)
        if value != 1:
            raise CheckpointError(f"{gguf.path}: {prefix}.{name} is {value:g}: wanted 1")


def _as_meant(stored: float) -> float:
    """Return a number that is stored as float32: seven digits give back what was meant."""
    return float(f"{stored:.7g}")


def _llama3_scaling_factor(gguf: GgufFile, head_dim: int, rope_theta: float) -> float | None:
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
