"""The multipliers of Granite, as config.json states them, in terms of the one decoder.

Granite has embeddings times e (`embedding_multiplier`), adds r times (`residual_multiplier`) what
attention and MLP compute of the normed stream, and multiplies scores by `attention_multiplier`.
Stream x[k + 1] = x[k] + r * f(norm(x[k])) with x[0] = e * embedding is, divided by r,
y[k + 1] = y[k] + f(norm(r * y[k])) with y[0] = e / r * embedding. A norm divides by the root of
mean(x * x) + epsilon, and so of r * r * (mean(y * y) + epsilon / (r * r)): norm(r * y) is the norm
of y with epsilon / (r * r). This holds for the final norm too, so additions are plain ones.
"""

from __future__ import annotations

from typing import Any

from engine.runner.weights.spec.config_values import ConfigValues

_LEAST, _MOST = 1e-4, 1e4
"""Beyond these, what is computed of all four and of the epsilon may be no float32."""


def granite_parts(config: ConfigValues, rms_epsilon: float) -> dict[str, Any]:
    """Return the fields of a `DecoderSpec` in which Granite differs from Llama.

    `rms_epsilon` is that of config.json. Raises `CheckpointError` for multipliers that cannot be.
    """
    residual = _multiplier(config, "residual_multiplier")
    return {
        "rms_epsilon": rms_epsilon / residual**2,
        "embedding_scale": _multiplier(config, "embedding_multiplier") / residual,
        "score_divisor": _multiplier(config, "attention_multiplier") ** -2,
        "logits_divisor": _multiplier(config, "logits_scaling"),
    }


def _multiplier(config: ConfigValues, key: str) -> float:
    found = config.number(key, 1.0)
    if not _LEAST <= found <= _MOST:
        raise config.refuse(key, f"a number from {_LEAST:g} to {_MOST:g}")
    return found
