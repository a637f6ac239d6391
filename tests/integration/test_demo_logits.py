"""The demo model's logits of a short prompt, pinned to the last bit.

Products, norms and softmax are chains in a fixed order of sixteen lanes, whatever registers the
processor has (`tests/equality/test_narrow_registers.py`). The digest with float32 activations is
also that of the code which widened the weights to float32 (the commit before c0f43b3). Only the
rotary tables are numpy's: without fused multiply-adds it rounds some of them differently.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from llvmlite.binding import get_host_cpu_features

from engine.runner.weights.model_spec import read_decoder_spec
from engine.runner.weights.rope import rotary_tables
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.models.running import load, logits_of, scheduled

PROMPT = [504, 11038, 282, 623, 42583, 359, 260, 1142, 335, 897, 3746, 30]
"""The bits of these logits are the same on every machine."""
DIGESTS = {"float32": "6c9e9f28e53430ce", "int8": "6e6c2f4c67b21c9c"}
"""By the type of activations."""

pytestmark = pytest.mark.skipif(
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


def test_rotary_tables() -> None:
    spec = read_decoder_spec(demo_model_folder())
    assert digest(*rotary_tables(spec, 64)) == "5330dc380f4cc7ed"


@pytest.mark.parametrize("activation_dtype", DIGESTS)
def test_logits(activation_dtype: str) -> None:
    assert digest_of(activation_dtype) == DIGESTS[activation_dtype]
