"""The decoder in plain Paddle operators: any device, and the reference for the CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.runner.cache.kv_cache import KVCache
from engine.runner.flat_batch import FlatBatch
from engine.runner.paddle.attention import PaddleAttention
from engine.runner.paddle_import import paddle
from engine.runner.weights.key_scales import has_key_scales, key_scales
from engine.runner.weights.model_spec import DecoderSpec, RopeSpec
from engine.runner.weights.rope import halves_first, rotary_tables
from engine.runner.weights.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection; `weight` is `[inputs, outputs]`."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PaddleLayer:
    """One layer's weights."""

    input_norm: paddle.Tensor
    qkv: Linear
    query_norm: paddle.Tensor | None
    key_norm: paddle.Tensor | None
    key_scales: paddle.Tensor | None
    output: Linear
    attended_norm: paddle.Tensor | None
    mlp_norm: paddle.Tensor
    gate_up: Linear
    down: Linear
    mlp_output_norm: paddle.Tensor | None


@dataclass(slots=True)
class _Hidden:
    """Rows of hidden states; replaced layer by layer."""

    rows: paddle.Tensor


class PaddleDecoder:
    """A `decoder.Decoder`. An MTP layer shares the public parts."""

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: TensorSource,
        cache: KVCache,
        max_len: int,
        attention: PaddleAttention,
        dtype: str,
    ) -> None:
        """Read the weights, and compute in `dtype`."""
        self.num_layers = spec.num_layers
        self.spec, self._attention = spec, attention
        self._dtype, self._stored = dtype, cache.layout.dtype
        self._angles = {
            rope: tuple(map(paddle.to_tensor, rotary_tables(replace(spec, rope=rope), max_len)))
            for rope in spec.ropes
        }
        self.embedding = self.tensor(checkpoint.read("model.embed_tokens.weight"))
        self.head = self.embedding
        if not spec.has_tied_embeddings:
            self.head = self.tensor(checkpoint.read("lm_head.weight"))
        self._final_norm = self.tensor(checkpoint.read("model.norm.weight"))
        self._layers = [
            self.load_layer(checkpoint, f"model.layers.{i}.") for i in range(spec.num_layers)
        ]

    def tensor(self, values: np.ndarray) -> paddle.Tensor:
        """Return `values` on the device, in the dtype of the computation."""
        return paddle.to_tensor(values).astype(self._dtype)

    def load_layer(self, files: TensorSource, prefix: str) -> PaddleLayer:
        """Load the layer whose tensors' names begin with `prefix`."""
        spec = self.spec

        def read(name: str) -> np.ndarray:
            """Read a tensor, reordered to halves first if the family rotates neighbours."""
            values = files.read(prefix + name)
            is_rotated = any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
            if is_rotated and spec.is_rope_interleaved:
                return halves_first(values, spec.head_dim)
            return values

        def linear(names: list[str], has_bias: bool) -> Linear:
            weight = np.concatenate([read(f"{name}.weight") for name in names]).T
            bias = None
            if has_bias:
                bias = self.tensor(np.concatenate([read(f"{name}.bias") for name in names]))
            return Linear(self.tensor(np.ascontiguousarray(weight)), bias)

        def norm(name: str) -> paddle.Tensor:
            return self.tensor(read(f"{name}.weight"))

        return PaddleLayer(
            input_norm=norm("input_layernorm"),
            qkv=linear([f"self_attn.{n}_proj" for n in "qkv"], spec.has_qkv_bias),
            query_norm=norm("self_attn.q_norm") if spec.has_head_norms else None,
            key_norm=norm("self_attn.k_norm") if spec.has_head_norms else None,
            key_scales=self._key_scales(files, prefix),
            output=linear(["self_attn.o_proj"], spec.has_output_bias),
            attended_norm=norm("post_attention_layernorm") if spec.has_output_norms else None,
            mlp_norm=norm(spec.mlp_norm),
            gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], spec.has_mlp_bias),
            down=linear(["mlp.down_proj"], spec.has_mlp_bias),
            mlp_output_norm=norm("post_feedforward_layernorm") if spec.has_output_norms else None,
        )

    def _key_scales(self, files: TensorSource, prefix: str) -> paddle.Tensor | None:
        """Return the divisors of a layer's keys, `[kv_heads, head_dim]`; None: all are ones."""
        if not has_key_scales(self.spec, self._stored):
            return None
        scales = key_scales(files, prefix, self.spec, self._stored)
        return self.tensor(np.concatenate([scales, scales], axis=1))

    @paddle.no_grad()
    def begin(self, batch: FlatBatch) -> _Hidden:
        self.begin_rows(batch)
        rows = self.embedding[paddle.to_tensor(batch.token_ids)]
        scale = self.spec.embedding_scale
        return _Hidden(rows if scale == 1.0 else rows * scale)

    @paddle.no_grad()
    def run_layer(self, index: int, hidden: _Hidden) -> None:
        hidden.rows = self.advance(self._layers[index], index, hidden.rows)

    def logits(self, hidden: _Hidden, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.device_logits(hidden, rows).numpy())

    @paddle.no_grad()
    def device_logits(self, hidden: _Hidden, rows: np.ndarray) -> paddle.Tensor:
        """Return float32 logits `[len(rows), vocab_size]` of these rows, on the device."""
        states = self.final_states(hidden, rows)
        return paddle.matmul(states, self.head, transpose_y=True).astype("float32")

    def final_states(self, hidden: _Hidden, rows: np.ndarray) -> paddle.Tensor:
        """Return these rows after the final norm, `[len(rows), hidden_size]`."""
        return self.norm(hidden.rows[paddle.to_tensor(rows)], self._final_norm)

    def begin_rows(self, batch: FlatBatch) -> None:
        """Prepare what all layers share; following calls of `advance` are for these rows."""
        positions = paddle.to_tensor(batch.positions)
        self._row_angles = {
            rope: tuple(angles[positions].unsqueeze(1) for angles in tables)
            for rope, tables in self._angles.items()
        }
        self._attention.begin(batch)

    def advance(self, layer: PaddleLayer, index: int, rows: paddle.Tensor) -> paddle.Tensor:
        """Return `rows` `[rows, hidden_size]` after one layer, the cache's layer `index`."""
        spec, num_rows = self.spec, rows.shape[0]
        fused = layer.qkv(self.norm(rows, layer.input_norm))
        heads = fused.reshape([num_rows, -1, spec.head_dim])
        counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        query, key, value = paddle.split(heads, counts, axis=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self.norm(query, layer.query_norm)
            key = self.norm(key, layer.key_norm)
        rope = spec.rope_of(index)
        query, key = self._rotate(query, rope), self._rotate(key, rope)
        if layer.key_scales is not None:
            group = spec.num_heads // spec.num_kv_heads
            query = query * paddle.repeat_interleave(layer.key_scales, group, axis=0)
            key = key / layer.key_scales
        out = self._attention.attend(index, query, key, value)
        attended = layer.output(out.reshape([num_rows, -1]))
        if layer.attended_norm is not None:
            attended = self.norm(attended, layer.attended_norm)
        rows = rows + attended
        gate, up = paddle.chunk(layer.gate_up(self.norm(rows, layer.mlp_norm)), 2, axis=-1)
        added = layer.down(self._activated(gate) * up)
        if layer.mlp_output_norm is not None:
            added = self.norm(added, layer.mlp_output_norm)
        return rows + added

    def _activated(self, gate: paddle.Tensor) -> paddle.Tensor:
        if self.spec.is_gelu:
            return paddle.nn.functional.gelu(gate, approximate=True)
        return paddle.nn.functional.silu(gate)

    def norm(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Apply RMS norm over the last axis."""
        wide = x.astype("float32")
        scale = paddle.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.rms_epsilon)
        return (wide * scale).astype(x.dtype) * weight

    def _rotate(self, x: paddle.Tensor, rope: RopeSpec) -> paddle.Tensor:
        """Rotate the pairs (i, i + half) of `[rows, heads, head_dim]` to the rows' positions."""
        low, high = paddle.chunk(x.astype("float32"), 2, axis=-1)
        cosine, sine = self._row_angles[rope]
        turned = [low * cosine - high * sine, high * cosine + low * sine]
        return paddle.concat(turned, axis=-1).astype(x.dtype)
