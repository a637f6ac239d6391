"""The weights before the first step: a linear regression, and the target's last layer as features.

The next hidden state is regressed on this one and the next token's embedding, which gives the
projection. The residual is regressed on the inputs of the last layer's MLP at that estimate, which
gives the output weights of this layer's MLP. Attention starts with output 0. All of it takes
seconds, and saves the first hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import DecoderSpec
from tools.mtp_training.mtp_layer import weight_shapes
from tools.mtp_training.work_folder import Conversation

_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""Weights that an ordinary layer does not have."""
_SAMPLED = 60_000
_ROWS_AT_ONCE = 4096
_RIDGE = 1e-3
_SMALLEST_NORM_WEIGHT = 0.2


def first_weights(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    conversations: Sequence[Conversation],
    draw: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Return float32 weights by name within the layer.

    The layer works on states after the target's final norm, scaled to a mean square of 1, so that
    its own outputs can replace them; the last layer's input norms are divided by the final norm's
    weights to fit.
    """
    last = f"model.layers.{spec.num_layers - 1}."
    shared = [name for name in weight_shapes(spec) if name not in _OWN]
    weights = {name: checkpoint.read(last + name) for name in shared}
    final_norm = checkpoint.read("model.norm.weight")
    small = np.abs(final_norm) < _SMALLEST_NORM_WEIGHT
    divisor = np.where(small, np.copysign(_SMALLEST_NORM_WEIGHT, final_norm), final_norm)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        weights[name] = weights[name] / divisor * np.abs(final_norm).mean()

    embedding = checkpoint.read("model.embed_tokens.weight")
    joined, following, size = _sample(conversations, embedding, draw)
    projection = _regress(joined, following)
    guess = joined @ projection.T
    normed = _unit(guess) * weights["post_attention_layernorm.weight"]
    gate = normed @ weights["mlp.gate_proj.weight"].T
    inner = gate / (1 + np.exp(-gate)) * (normed @ weights["mlp.up_proj.weight"].T)
    weights |= {
        "enorm.weight": np.ones(spec.hidden_size),
        "hnorm.weight": np.ones(spec.hidden_size),
        "eh_proj.weight": projection,
        "self_attn.o_proj.weight": np.zeros_like(weights["self_attn.o_proj.weight"]),
        "mlp.down_proj.weight": _regress(inner, following - guess),
        "shared_head.norm.weight": np.full(spec.hidden_size, size),
    }
    return {name: weight.astype(np.float32) for name, weight in weights.items()}


def _sample(
    conversations: Sequence[Conversation], embedding: np.ndarray, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return inputs, next states, and the states' size before scaling.

    Inputs are `[rows, 2 * hidden_size]`, next states `[rows, hidden_size]`.
    """
    answers = [slice(c.prompt_len - 1, len(c.states) - 1) for c in conversations]
    states, following, tokens = [], [], []
    for c, part in zip(conversations, answers, strict=True):
        states.append(c.states[part])
        following.append(c.states[part.start + 1 :])
        tokens.append(c.token_ids[part.start + 1 : part.stop + 1])
    num_rows = sum(map(len, tokens))
    chosen = draw.choice(num_rows, min(_SAMPLED, num_rows), replace=False)
    next_states = np.concatenate(following)[chosen].astype(np.float32)
    embedded = embedding[np.concatenate(tokens)[chosen]]
    joined = [_unit(embedded), _unit(np.concatenate(states)[chosen].astype(np.float32))]
    size = float(np.sqrt(np.mean(np.square(next_states), axis=1)).mean())
    return np.concatenate(joined, axis=1), _unit(next_states), size


def _regress(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return weights `[outputs, inputs]` of least squared error, by ridge regression."""
    width = inputs.shape[1]
    gram, moments = np.zeros((width, width)), np.zeros((width, outputs.shape[1]))
    for first in range(0, len(inputs), _ROWS_AT_ONCE):
        rows = inputs[first : first + _ROWS_AT_ONCE]
        gram += rows.T @ rows
        moments += rows.T @ outputs[first : first + _ROWS_AT_ONCE]
    gram[np.diag_indices(width)] += _RIDGE * np.trace(gram) / width
    return np.asarray(np.linalg.solve(gram, moments).T)


def _unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + 1e-6))
