"""Digests of the demo model's logits, which pin their bits."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from llvmlite.binding import get_host_cpu_features

from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.models.running import load, logits_of, scheduled

PROMPT = [504, 11038, 282, 623, 42583, 359, 260, 1142, 335, 897, 3746, 30]
"""The bits of these logits are the same on every machine."""
DIGESTS = {"float32": "6c9e9f28e53430ce", "int8": "6e6c2f4c67b21c9c"}
"""By the type of activations."""
WITH_FMA = pytest.mark.skipif(
    not get_host_cpu_features().get("fma"),
    reason="the digests are those of x86-64 processors with FMA",
)


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def digest_of(activation_dtype: str) -> str:
    """Return the digest of the demo model's logits behind `PROMPT`."""
    runner = load(
        demo_model_folder(), 256, activation_dtype=activation_dtype, kv_cache_memory=64 << 20
    )
    [logits] = logits_of(runner, scheduled(PROMPT, 0, [3]))
    return digest(logits)
