"""The MTP layer written down once more: numpy, float64, one row at a time, a list as KV cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.runner.weights.spec.model_spec import DecoderSpec


class ReferenceMtp:
    """The layer as an engine runs it: true states store keys and values, drafts add theirs."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, np.ndarray]) -> None:
        self._spec = spec
        self._weights = {name: weight.astype(np.float64) for name, weight in weights.items()}

    def drafts(
        self,
        embedded: np.ndarray,
        states: np.ndarray,
        position: int,
        count: int,
    ) -> list[np.ndarray]:
        """Inputs of the head for `count` drafts from `position` on.

        embedded: `[tokens, hidden_size]`, of every token, those that are drafted too
        states: the target's `[tokens, hidden_size]`, of which those up to `position` are used
        """
        cache: list[tuple[np.ndarray, np.ndarray]] = []
        out = np.zeros(0)
        for i in range(position + 1):
            out = self._row(embedded[i + 1], states[i], i, cache)
        found = [self._norm(out, "shared_head.norm")]
        for i in range(position + 1, position + count):
            out = self._row(embedded[i + 1], out, i, cache)
            found.append(self._norm(out, "shared_head.norm"))
        return found

    def _row(
        self,
        embedded: np.ndarray,
        state: np.ndarray,
        position: int,
        cache: list[tuple[np.ndarray, np.ndarray]],
    ) -> np.ndarray:
        spec, w = self._spec, self._weights
        joined = np.concatenate([self._norm(embedded, "enorm"), self._norm(state, "hnorm")])
        x = w["eh_proj.weight"] @ joined
        normed = self._norm(x, "input_layernorm")
        query, key, value = (
            (w[f"self_attn.{name}_proj.weight"] @ normed).reshape(-1, spec.head_dim)
            for name in "qkv"
        )
        cache.append((self._rotated(key, position), value))
        query = self._rotated(query, position)
        heads = []
        for head in range(spec.num_heads):
            of = head // (spec.num_heads // spec.num_kv_heads)
            scores = np.array([query[head] @ k[of] for k, _ in cache]) / np.sqrt(spec.head_dim)
            chances = np.exp(scores - scores.max())
            heads.append(chances / chances.sum() @ np.array([v[of] for _, v in cache]))
        x = x + w["self_attn.o_proj.weight"] @ np.concatenate(heads)
        normed = self._norm(x, "post_attention_layernorm")
        gate = w["mlp.gate_proj.weight"] @ normed
        inner = gate / (1 + np.exp(-gate)) * (w["mlp.up_proj.weight"] @ normed)
        return np.asarray(x + w["mlp.down_proj.weight"] @ inner)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt(np.mean(np.square(x)) + self._spec.rms_epsilon)
        return np.asarray(x / scale * self._weights[f"{name}.weight"])

    def _rotated(self, heads: np.ndarray, position: int) -> np.ndarray:
        half = self._spec.head_dim // 2
        angle = position * self._spec.rope.theta ** -(np.arange(half) / half)
        low, high = heads[:, :half], heads[:, half:]
        turned = [
            low * np.cos(angle) - high * np.sin(angle),
            high * np.cos(angle) + low * np.sin(angle),
        ]
        return np.concatenate(turned, axis=1)
