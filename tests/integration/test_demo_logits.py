"""The demo model's logits of a short prompt, pinned to the last bit.

Products, norms and softmax are chains in a fixed order of sixteen lanes, whatever registers the
processor has (`tests/equality/test_narrow_registers.py`). The digest with float32 activations is
also that of the code which widened the weights to float32 (the commit before c0f43b3). Only the
rotary tables are numpy's: without fused multiply-adds it rounds some of them differently.
"""

from __future__ import annotations

import pytest

from engine.runner.weights.rope import rotary_tables
from engine.runner.weights.spec.model_spec import read_decoder_spec
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.models.demo_digests import DIGESTS, WITH_FMA, digest, digest_of

pytestmark = WITH_FMA


def test_rotary_tables() -> None:
    spec = read_decoder_spec(demo_model_folder())
    assert digest(*rotary_tables(spec, 64)) == "5330dc380f4cc7ed"


@pytest.mark.parametrize("activation_dtype", DIGESTS)
def test_logits(activation_dtype: str) -> None:
    assert digest_of(activation_dtype) == DIGESTS[activation_dtype]
