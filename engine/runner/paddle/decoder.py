"""The decoder in plain Paddle operators: any device, and the reference for the CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.runner.cache.kv_cache import KVCache
from engine.runner.flat_batch import FlatBatch
from engine.runner.paddle.attention import PaddleAttention
from engine.runner.paddle_import import paddle
from engine.runner.weights.key_scales import has_key_scales, key_scales
from engine.runner.weights.rope import rotary_tables
from engine.runner.weights.spec.decoder_tensors import (
    CHOICE_BIAS,
    EXPERT_GATE,
    SHARED_EXPERTS,
    SINKS,
)
from engine.runner.weights.spec.expert_mixture import ClampedSwish, ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.spec.rope_spec import RopeSpec
from engine.runner.weights.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection; `weight` is `[inputs, outputs]`."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(silu(gate(x)) * up(x))`, with GELU's approximation by tanh where it `is_gelu`.

    With `clamped_swish` it takes the place of `silu(gate) * up`.
    """

    gate_up: Linear
    down: Linear
    is_gelu: bool
    clamped_swish: ClampedSwish | None = None

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        gate, up = paddle.chunk(self.gate_up(x), 2, axis=-1)
        if self.clamped_swish is not None:
            steepness, limit = self.clamped_swish.steepness, self.clamped_swish.limit
            gate, up = gate.clip(max=limit), up.clip(-limit, limit)
            sigmoid = paddle.nn.functional.sigmoid(gate * steepness)
            return self.down((up + 1.0) * gate * sigmoid)
        if self.is_gelu:
            return self.down(paddle.nn.functional.gelu(gate, approximate=True) * up)
        return self.down(paddle.nn.functional.silu(gate) * up)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of MLPs: see `expert_mixture`. `choice_bias` is `[experts]`."""

    mixture: ExpertMixture
    gate: Linear
    choice_bias: paddle.Tensor | None
    experts: list[GatedMlp]
    shared: GatedMlp | None

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return the sum over a token's experts, added in the order of their numbers."""
        weights = self._weights(x)
        total = paddle.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = paddle.nonzero(weights[:, index]).flatten()
            if rows.shape[0]:
                added = expert(x[rows]) * weights[rows, index : index + 1].astype(x.dtype)
                total = paddle.scatter_nd_add(total, rows.unsqueeze(1), added)
        return total if self.shared is None else total + self.shared(x)

    def _weights(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return the weight of each expert for each row, float32 `[rows, experts]`, mostly 0."""
        products = self.gate(x).astype("float32")
        to_scores = paddle.nn.functional.softmax
        if self.mixture.is_sigmoid:
            to_scores = paddle.nn.functional.sigmoid
        scores = to_scores(products)
        wanted = scores if self.choice_bias is None else scores + self.choice_bias
        # A stable sort: of equal scores the first expert is chosen.
        order = paddle.argsort(wanted, axis=-1, descending=True, stable=True)
        chosen = order[:, : self.mixture.num_chosen]
        weights = paddle.take_along_axis(scores, chosen, axis=1)
        if self.mixture.is_normalised:
            weights = weights / weights.sum(-1, keepdim=True).clip(min=self.mixture.least_sum)
        if self.mixture.weight_scale != 1.0:
            weights = weights * self.mixture.weight_scale
        return paddle.put_along_axis(paddle.zeros_like(scores), chosen, weights, axis=1)


@dataclass(frozen=True, slots=True)
class PaddleLayer:
    """One layer's weights; `mlp` is one MLP or a mixture of them, `sinks` float32 `[heads]`."""

    input_norm: paddle.Tensor
    qkv: Linear
    query_norm: paddle.Tensor | None
    key_norm: paddle.Tensor | None
    key_scales: paddle.Tensor | None
    sinks: paddle.Tensor | None
    output: Linear
    attended_norm: paddle.Tensor | None
    mlp_norm: paddle.Tensor
    mlp: GatedMlp | Experts
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
            self.load_layer(checkpoint, f"model.layers.{i}.", spec.mixture_of(i))
            for i in range(spec.num_layers)
        ]

    def tensor(self, values: np.ndarray) -> paddle.Tensor:
        """Return `values` on the device, in the dtype of the computation."""
        return paddle.to_tensor(values).astype(self._dtype)

    def load_layer(
        self, files: TensorSource, prefix: str, mixture: ExpertMixture | None = None
    ) -> PaddleLayer:
        """Load the layer whose tensors' names begin with `prefix`; None: it has one MLP."""
        spec = self.spec

        def read(name: str) -> np.ndarray:
            return files.read(prefix + name)

        def linear(names: list[str], has_bias: bool) -> Linear:
            weight = np.concatenate([read(f"{name}.weight") for name in names]).T
            bias = None
            if has_bias:
                bias = self.tensor(np.concatenate([read(f"{name}.bias") for name in names]))
            return Linear(self.tensor(np.ascontiguousarray(weight)), bias)

        def norm(name: str) -> paddle.Tensor:
            return self.tensor(read(f"{name}.weight"))

        def mlp(part: str, expert_of: ExpertMixture | None = None) -> GatedMlp:
            has_bias = spec.has_mlp_bias if expert_of is None else expert_of.has_biases
            return GatedMlp(
                gate_up=linear([f"{part}.gate_proj", f"{part}.up_proj"], has_bias),
                down=linear([f"{part}.down_proj"], has_bias),
                is_gelu=spec.is_gelu,
                clamped_swish=None if expert_of is None else expert_of.clamped_swish,
            )

        def experts(mixture: ExpertMixture) -> Experts:
            bias = None
            if mixture.has_choice_bias:
                bias = paddle.to_tensor(files.read(prefix + CHOICE_BIAS).reshape(-1))
            shared = mlp(SHARED_EXPERTS) if mixture.shared_size else None
            each = [mlp(f"mlp.experts.{i}", mixture) for i in range(mixture.num_experts)]
            gate = linear([EXPERT_GATE], mixture.has_gate_bias)
            return Experts(mixture, gate, bias, each, shared)

        return PaddleLayer(
            input_norm=norm("input_layernorm"),
            qkv=linear([f"self_attn.{n}_proj" for n in "qkv"], spec.has_qkv_bias),
            query_norm=norm("self_attn.q_norm") if spec.has_head_norms else None,
            key_norm=norm("self_attn.k_norm") if spec.has_head_norms else None,
            key_scales=self._key_scales(files, prefix),
            sinks=paddle.to_tensor(read(SINKS)) if spec.has_sinks else None,
            output=linear(["self_attn.o_proj"], spec.has_output_bias),
            attended_norm=norm("post_attention_layernorm") if spec.has_output_norms else None,
            mlp_norm=norm(spec.mlp_norm),
            mlp=mlp("mlp") if mixture is None else experts(mixture),
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
        out = self._attention.attend(index, query, key, value, layer.sinks)
        attended = layer.output(out.reshape([num_rows, -1]))
        if layer.attended_norm is not None:
            attended = self.norm(attended, layer.attended_norm)
        rows = rows + attended
        added = layer.mlp(self.norm(rows, layer.mlp_norm))
        if layer.mlp_output_norm is not None:
            added = self.norm(added, layer.mlp_output_norm)
        return rows + added

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
