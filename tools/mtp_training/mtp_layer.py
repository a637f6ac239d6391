"""The layer that is trained: DeepSeek's multi-token-prediction module on a dense Llama layer.

At position i it joins the target's last hidden state h_i (after its final norm) with the embedding
of token i + 1, runs one decoder layer over both, and its output, normed, times the target's own
head gives the logits of token i + 2. For the next draft the layer's output replaces h.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from common.errors import ConfigError
from engine.runner.paddle_import import paddle
from engine.runner.weights.rope import rotary_tables
from engine.runner.weights.spec.model_spec import DecoderSpec

KeyValue = tuple[paddle.Tensor, paddle.Tensor]
"""Keys and values `[batch, rows, num_kv_heads, head_dim]`."""


def weight_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return names (within the layer) and shapes of the trained weights."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "shared_head.norm.weight": (hidden,),
    }


class MtpLayer:
    """The layer's parameters and its forward pass."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, np.ndarray], max_len: int) -> None:
        self._spec = spec
        self.weights = {}
        for name in weight_shapes(spec):
            parameter = paddle.create_parameter(
                list(weights[name].shape),
                "float32",
                default_initializer=paddle.nn.initializer.Assign(weights[name]),
            )
            parameter.name = name  # the optimizer's state uses this name
            self.weights[name] = parameter
        cosines, sines = rotary_tables(spec, max_len)
        self._cosines, self._sines = paddle.to_tensor(cosines), paddle.to_tensor(sines)

    def parameters(self) -> list[paddle.Tensor]:
        """Return the trained parameters."""
        return list(self.weights.values())

    def join(self, embedded: paddle.Tensor, states: paddle.Tensor) -> paddle.Tensor:
        """Return the decoder layer's input, like the arguments `[batch, rows, hidden_size]`."""
        normed = [self._norm(embedded, "enorm"), self._norm(states, "hnorm")]
        return self._linear(paddle.concat(normed, axis=-1), "eh_proj")

    def keys_values(self, joined: paddle.Tensor, positions: paddle.Tensor) -> KeyValue:
        """Return keys and values of rows `[batch, rows, hidden_size]` at int64 `[batch, rows]`."""
        normed = self._norm(joined, "input_layernorm")
        key = self._heads(normed, "self_attn.k_proj")
        return self._rotate(key, positions), self._heads(normed, "self_attn.v_proj")

    def outputs(
        self,
        joined: paddle.Tensor,
        positions: paddle.Tensor,
        prefix: KeyValue,
        mask: paddle.Tensor,
        drafts: Sequence[KeyValue] = (),
    ) -> paddle.Tensor:
        """Return the layer's output `[batch, rows, hidden_size]`.

        mask: `[batch, 1, 1, rows, keys]`, 0 or a large negative number, added to the scores of
        the prefix's keys
        drafts: keys and values that each row alone sees: of its earlier drafts and its own
        """
        normed = self._norm(joined, "input_layernorm")
        query = self._rotate(self._heads(normed, "self_attn.q_proj"), positions)
        attended = self._attend(query, prefix, mask, drafts)
        x = joined + self._linear(attended, "self_attn.o_proj")
        normed = self._norm(x, "post_attention_layernorm")
        gate = paddle.nn.functional.silu(self._linear(normed, "mlp.gate_proj"))
        return x + self._linear(gate * self._linear(normed, "mlp.up_proj"), "mlp.down_proj")

    def head_input(self, output: paddle.Tensor) -> paddle.Tensor:
        """Return the input of the target's head."""
        return self._norm(output, "shared_head.norm")

    def _attend(
        self,
        query: paddle.Tensor,
        prefix: KeyValue,
        mask: paddle.Tensor,
        drafts: Sequence[KeyValue],
    ) -> paddle.Tensor:
        """Attend from every query to the whole prefix under `mask`, and to its own drafts."""
        spec = self._spec
        batch, rows = query.shape[:2]
        shared = spec.num_heads // spec.num_kv_heads  # query heads of each key head
        grouped = [batch, rows, spec.num_kv_heads, shared, spec.head_dim]
        query = (query * spec.head_dim**-0.5).reshape(grouped).transpose([0, 2, 3, 1, 4])
        keys, values = (x.transpose([0, 2, 1, 3]) for x in prefix)
        flat = query.reshape([batch, spec.num_kv_heads, shared * rows, spec.head_dim])
        scores = paddle.matmul(flat, keys, transpose_y=True)
        scores = scores.reshape([batch, spec.num_kv_heads, shared, rows, -1]) + mask
        own = [[x.transpose([0, 2, 1, 3]).unsqueeze(2) for x in draft] for draft in drafts]
        if own:
            own_scores = [(query * key).sum(-1, keepdim=True) for key, _ in own]
            scores = paddle.concat([scores, *own_scores], axis=-1)
        chances = paddle.nn.functional.softmax(scores)
        num_keys = keys.shape[2]
        on_prefix = chances[..., :num_keys] if own else chances
        on_prefix = on_prefix.reshape([batch, spec.num_kv_heads, -1, num_keys])
        out = paddle.matmul(on_prefix, values).reshape(query.shape)
        for i, (_, value) in enumerate(own):
            out = out + chances[..., num_keys + i : num_keys + i + 1] * value
        return out.transpose([0, 3, 1, 2, 4]).reshape([batch, rows, -1])

    def _heads(self, normed: paddle.Tensor, name: str) -> paddle.Tensor:
        return self._linear(normed, name).reshape([*normed.shape[:2], -1, self._spec.head_dim])

    def _rotate(self, x: paddle.Tensor, positions: paddle.Tensor) -> paddle.Tensor:
        cosine = self._cosines[positions].unsqueeze(2)
        sine = self._sines[positions].unsqueeze(2)
        low, high = paddle.chunk(x, 2, axis=-1)
        return paddle.concat([low * cosine - high * sine, high * cosine + low * sine], axis=-1)

    def _linear(self, x: paddle.Tensor, name: str) -> paddle.Tensor:
        return paddle.matmul(x, self.weights[f"{name}.weight"], transpose_y=True)

    def _norm(self, x: paddle.Tensor, name: str) -> paddle.Tensor:
        return unit_rms(x, self._spec.rms_epsilon) * self.weights[f"{name}.weight"]


def unit_rms(x: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Return `x` scaled so that the mean square of its last axis is 1."""
    return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def refuse_other_layers(spec: DecoderSpec) -> None:
    """Raise `ConfigError` when the model's layers have parts that this layer does not have."""
    for name in (
        "has_qkv_bias",
        "has_output_bias",
        "has_mlp_bias",
        "has_head_norms",
        "is_rope_interleaved",
    ):
        if getattr(spec, name):
            raise ConfigError(
                f"{spec.architecture} with {name}: wanted a model with layers like Llama's, "
                "without biases and head norms"
            )
