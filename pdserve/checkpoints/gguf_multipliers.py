"""The multipliers of Granite that a GGUF file describes, in the keys of a config.json.

Keys and defaults are those of llama.cpp: what is 0, or not there, multiplies nothing, and scores
are then divided by the root of a head's size.
"""

from __future__ import annotations

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile

_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_SWITCH = "granite.rope.scaling.finetuned"


def granite_multipliers(gguf: GgufFile, head_dim: int) -> dict[str, float]:
    """Return the keys of `GraniteForCausalLM` that Llama does not have.

    Raises `CheckpointError` without a divisor of logits, and for heads that are not rotated.
    """
    if not gguf.flag(_SWITCH, True):
        raise CheckpointError(f"{gguf.path}: {_SWITCH} is False: wanted heads that are rotated")
    found = {}
    for key, in_gguf in _KEYS.items():
        default = None if key == "logits_scaling" else 0.0
        # Stored as float32: seven digits give back the number that was meant.
        found[key] = float(f"{gguf.number(f'granite.{in_gguf}', default):.7g}")
    neutral = dict.fromkeys(_KEYS, 1.0) | {"attention_multiplier": head_dim**-0.5}
    return {key: value or neutral[key] for key, value in found.items()}
