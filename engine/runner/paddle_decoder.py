"""The decoder in plain Paddle operators: any device, and the reference for the CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.runner.checkpoint import Checkpoint
from engine.runner.flat_batch import FlatBatch
from engine.runner.framework import paddle
from engine.runner.kv_cache import KVCache
from engine.runner.model_spec import DecoderSpec
from engine.runner.paddle_attention import PaddleAttention
from engine.runner.rope import halves_first, rotary_tables


@dataclass(frozen=True, slots=True)
class _Linear:
    """`weight` `[inputs, outputs]`."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: paddle.Tensor
    qkv: _Linear
    query_norm: paddle.Tensor | None
    key_norm: paddle.Tensor | None
    output: _Linear
    mlp_norm: paddle.Tensor
    gate_up: _Linear
    down: _Linear


@dataclass(slots=True)
class _Hidden:
    """Rows of hidden states; replaced layer by layer."""

    rows: paddle.Tensor


class PaddleDecoder:
    """See `decoder.Decoder`."""

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        cache: KVCache,
        max_len: int,
        attention: PaddleAttention,
    ) -> None:
        self.num_layers = spec.num_layers
        self._spec, self._checkpoint, self._attention = spec, checkpoint, attention
        self._dtype = cache.layout.dtype
        cosines, sines = rotary_tables(spec, max_len)
        self._cosines, self._sines = paddle.to_tensor(cosines), paddle.to_tensor(sines)
        self._embedding = self._tensor(checkpoint.read("model.embed_tokens.weight"))
        self._head = self._embedding
        if not spec.has_tied_embeddings:
            self._head = self._tensor(checkpoint.read("lm_head.weight"))
        self._final_norm = self._tensor(checkpoint.read("model.norm.weight"))
        self._layers = [self._load_layer(f"model.layers.{i}.") for i in range(spec.num_layers)]

    def _tensor(self, values: np.ndarray) -> paddle.Tensor:
        return paddle.to_tensor(values).astype(self._dtype)

    def _read(self, name: str) -> np.ndarray:
        """A tensor, its heads' halves first where the family rotates neighbours."""
        values = self._checkpoint.read(name)
        is_rotated = any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
        if is_rotated and self._spec.is_rope_interleaved:
            return halves_first(values, self._spec.head_dim)
        return values

    def _linear(self, names: list[str], has_bias: bool) -> _Linear:
        weight = np.concatenate([self._read(f"{name}.weight") for name in names]).T
        bias = None
        if has_bias:
            bias = self._tensor(np.concatenate([self._read(f"{name}.bias") for name in names]))
        return _Linear(self._tensor(np.ascontiguousarray(weight)), bias)

    def _load_layer(self, prefix: str) -> _Layer:
        spec = self._spec
        has_norms = spec.has_head_norms
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

        def norm(name: str) -> paddle.Tensor:
            return self._tensor(self._read(f"{prefix}{name}.weight"))

        return _Layer(
            input_norm=norm("input_layernorm"),
            qkv=self._linear([f"{attention}{n}_proj" for n in "qkv"], spec.has_qkv_bias),
            query_norm=norm("self_attn.q_norm") if has_norms else None,
            key_norm=norm("self_attn.k_norm") if has_norms else None,
            output=self._linear([f"{attention}o_proj"], spec.has_output_bias),
            mlp_norm=norm("post_attention_layernorm"),
            gate_up=self._linear([f"{mlp}gate_proj", f"{mlp}up_proj"], spec.has_mlp_bias),
            down=self._linear([f"{mlp}down_proj"], spec.has_mlp_bias),
        )

    @paddle.no_grad()
    def begin(self, batch: FlatBatch) -> _Hidden:
        positions = paddle.to_tensor(batch.positions)
        self._row_cosines = self._cosines[positions].unsqueeze(1)
        self._row_sines = self._sines[positions].unsqueeze(1)
        self._attention.begin(batch)
        return _Hidden(self._embedding[paddle.to_tensor(batch.token_ids)])

    @paddle.no_grad()
    def run_layer(self, index: int, hidden: _Hidden) -> None:
        layer, spec = self._layers[index], self._spec
        rows = hidden.rows
        num_rows = rows.shape[0]
        fused = layer.qkv(self._norm(rows, layer.input_norm))
        heads = fused.reshape([num_rows, -1, spec.head_dim])
        counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        query, key, value = paddle.split(heads, counts, axis=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm(query, layer.query_norm)
            key = self._norm(key, layer.key_norm)
        out = self._attention.attend(index, self._rotate(query), self._rotate(key), value)
        rows = rows + layer.output(out.reshape([num_rows, -1]))
        gate, up = paddle.chunk(layer.gate_up(self._norm(rows, layer.mlp_norm)), 2, axis=-1)
        hidden.rows = rows + layer.down(paddle.nn.functional.silu(gate) * up)

    @paddle.no_grad()
    def logits(self, hidden: _Hidden, rows: np.ndarray) -> np.ndarray:
        chosen = self._norm(hidden.rows[paddle.to_tensor(rows)], self._final_norm)
        out = paddle.matmul(chosen, self._head, transpose_y=True).astype("float32")
        return np.asarray(out.numpy())

    def _norm(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        wide = x.astype("float32")
        scale = paddle.rsqrt(wide.square().mean(-1, keepdim=True) + self._spec.rms_epsilon)
        return (wide * scale).astype(x.dtype) * weight

    def _rotate(self, x: paddle.Tensor) -> paddle.Tensor:
        """Rotate the pairs (i, i + half) of `[rows, heads, head_dim]` to the rows' positions."""
        low, high = paddle.chunk(x.astype("float32"), 2, axis=-1)
        cosine, sine = self._row_cosines, self._row_sines
        turned = [low * cosine - high * sine, high * cosine + low * sine]
        return paddle.concat(turned, axis=-1).astype(x.dtype)
