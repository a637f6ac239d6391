"""The decoder on CPU kernels, in float32, on weights packed for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numba import get_num_threads, set_num_threads

from engine.runner.back_end import StepShape
from engine.runner.cache.kv_cache import KVCache
from engine.runner.cpu.layer_weights import NONE_1D, NONE_2D, activation_of, load_layer
from engine.runner.cpu.packed_weights import SharedWeights, decoder_plans, pack_privately
from engine.runner.cpu.step_buffers import RowBuffer, StepBuffers
from engine.runner.cpu.weight_memory import WeightMemory
from engine.runner.flat_batch import FlatBatch
from engine.runner.kernels.attention import STATE_LANES
from engine.runner.kernels.attention_plan import NO_WINDOW, PART_ROWS, plan_attention
from engine.runner.kernels.experts import ExpertBuffers, scratch_floats
from engine.runner.kernels.layer import (
    Attended,
    LayerBuffers,
    LayerCache,
    LayerConstants,
    LayerTables,
    Plain,
    whole_expert_layer,
    whole_layer,
)
from engine.runner.kernels.lock import KERNEL_LOCK
from engine.runner.kernels.norms import quantise_rows, rms_norm
from engine.runner.kernels.products.linear import gather_columns, is_fine, linear
from engine.runner.weights.rope import rotary_tables
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.spec.rope_spec import RopeSpec
from engine.runner.weights.tensor_source import TensorSource


class _Buffers:
    """Buffers of all steps. What a layer leaves in them is free for an MTP layer."""

    def __init__(
        self, spec: DecoderSpec, shape: StepShape, made: StepBuffers, *, with_bytes: bool
    ) -> None:
        rows, width = shape.num_tokens, spec.hidden_size
        attended = spec.num_heads * spec.head_dim
        self.hidden = made.rows(rows, width)
        self.normed = made.rows(rows, width)
        self.qkv = made.rows(rows, spec.qkv_size)
        self.attended = made.rows(rows, attended)
        inner_size = _widest_inner(spec)
        self.gated = made.rows(rows, inner_size)
        self.chosen = made.rows(shape.num_logits_rows, width)
        self.final = made.rows(shape.num_logits_rows, width)
        self.logits = made.rows(shape.num_logits_rows, spec.vocab_size)
        widest = max(width, attended, inner_size)
        # Two bytes per value: int8, with the scales and sums of its groups.
        self.quantised = made.rows(rows, widest // 2 if with_bytes else 0)
        self.parts = made.rows(PART_ROWS, spec.head_dim + STATE_LANES)
        self._inner_size = spec.intermediate_size
        self.experts: _ExpertRows | None = None
        if spec.experts is not None:
            self.experts = _ExpertRows(spec.experts, rows, width, made)

    def first(self, count: int) -> _Rows:
        """Return the first rows of those that layers use."""
        return _Rows(
            count=count,
            hidden=self.hidden.first(count),
            of_layer=self.of_layer(count, self.qkv.first(count)),
            of_experts=() if self.experts is None else self.experts.first(count, self.gated),
        )

    def of_layer(self, count: int, qkv: np.ndarray) -> Plain:
        """Return the first rows of a layer's buffers, with `qkv` among them: `LayerBuffers`."""
        rows = LayerBuffers(
            normed=self.normed.first(count),
            qkv=qkv,
            attended=self.attended.first(count),
            gated=self.gated.first(count, self._inner_size),
            quantised=self.quantised.first(count),
        )
        return tuple(rows)


def _widest_inner(spec: DecoderSpec) -> int:
    """Return the most floats of a row between gate and down."""
    experts = spec.experts
    if experts is None:
        return spec.intermediate_size
    slots = experts.num_chosen * experts.inner_size
    return max(spec.intermediate_size, slots, experts.shared_size)


class _ExpertRows:
    """What layers with experts need beside the buffers of all layers."""

    def __init__(
        self, mixture: ExpertMixture, num_rows: int, hidden_size: int, made: StepBuffers
    ) -> None:
        self._mixture = mixture
        self._scores = made.rows(num_rows, mixture.num_experts)
        self._chosen, self._weights, self._order = (
            made.rows(num_rows, mixture.num_chosen) for _ in range(3)
        )
        self._ends = made.rows(1, mixture.num_experts)
        self._scratch = made.rows(get_num_threads(), scratch_floats(hidden_size, num_rows))

    def first(self, count: int, gated: RowBuffer) -> Plain:
        """Return the first rows: an `ExpertBuffers`, whose `gated` ones are in this buffer."""
        mixture = self._mixture
        slots = gated.first(count, mixture.num_chosen * mixture.inner_size)
        buffers = ExpertBuffers(
            scores=self._scores.first(count),
            chosen=self._chosen.first(count).view(np.int32),
            weights=self._weights.first(count),
            order=self._order.first(count).view(np.int32).reshape(-1),
            ends=self._ends.first(1).view(np.int32)[0],
            gated=slots.reshape(-1, mixture.inner_size),
            shared_gated=gated.first(count, mixture.shared_size),
            scratch=self._scratch.first(self._scratch.num_rows),
        )
        return tuple(buffers)


@dataclass(slots=True)
class _Rows:
    """A step's part of the buffers, `[count, …]` each; `of_experts` is empty without experts."""

    count: int
    hidden: np.ndarray
    of_layer: Plain
    of_experts: Plain


class NumbaDecoder:
    """A `decoder.Decoder`. One thread at a time may use all of a process's instances.

    An MTP layer shares the public parts: packed weights, tables, constants and buffers.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: TensorSource,
        cache: KVCache,
        max_len: int,
        shape: StepShape,
        *,
        with_bytes: bool = False,
        packed_folder: Path | None = None,
    ) -> None:
        """Load the weights.

        `with_bytes`: products of quantised weights take activations in int8. Below `packed_folder`
        are the packed weights that nodes of this machine share (None: private memory). The kernels
        do not check sizes: `CpuBackEnd.why_not` does.
        """
        self.num_layers = spec.num_layers
        self.spec = spec
        self._windows = sorted({spec.window_of(index) for index in range(spec.num_layers)})
        self.num_threads = get_num_threads()
        self.epsilon = np.float32(spec.rms_epsilon)
        self.memory = WeightMemory()
        self.shape, self.step_buffers = shape, StepBuffers()
        self.with_bytes = with_bytes
        self.buffers = _Buffers(spec, shape, self.step_buffers, with_bytes=with_bytes)
        self._rows = self.buffers.first(0)
        plans = decoder_plans(spec)
        with KERNEL_LOCK:
            if packed_folder is None:
                packed = pack_privately(checkpoint, plans, self.memory, with_bytes=with_bytes)
            else:
                shared = SharedWeights(checkpoint, plans, packed_folder)
                packed = shared.map(with_bytes=with_bytes)
            activation = activation_of(spec)
        self._constants = {
            rope: self._constants_of(rope, max_len, activation) for rope in spec.ropes
        }
        self.shared_bytes = 0
        if packed_folder is not None:
            self.shared_bytes = sum(weight.data.nbytes for weight in packed.values())
        self.embedding = packed["embedding"]
        self.head = packed.get("head", self.embedding)
        self._final_norm = checkpoint.read("model.norm.weight")
        self.layers = [
            load_layer(
                checkpoint, f"model.layers.{i}.", spec, packed, cache.layout.dtype,
                spec.mixture_of(i),
            )
            for i in range(spec.num_layers)
        ]  # fmt: skip
        self._experts = [
            None if layer.experts is None else tuple(layer.experts) for layer in self.layers
        ]
        self.use_cache(cache)

    def use_cache(self, cache: KVCache) -> None:
        """Keep keys and values in `cache` from now on."""
        self._layers = [
            self.of_layer(layer.tables, slots, self.spec.rope_of(index))
            for index, (layer, slots) in enumerate(zip(self.layers, cache.slots(), strict=False))
        ]

    def of_layer(
        self, tables: LayerTables, slots: np.ndarray, rope: RopeSpec
    ) -> tuple[Plain, Plain, Plain]:
        """Return a layer with its `slots` of the cache, keys and values, as the kernels take it."""
        cache = LayerCache(slots[0], slots[1])
        return tuple(tables), tuple(self._constants[rope]), tuple(cache)

    def _constants_of(self, rope: RopeSpec, max_len: int, activation: int) -> LayerConstants:
        cosines, sines = rotary_tables(replace(self.spec, rope=rope), max_len)
        return LayerConstants(self.epsilon, activation, cosines, sines, self.num_threads)

    def begin(self, batch: FlatBatch) -> np.ndarray:
        rows = batch.token_ids.size
        set_num_threads(self.num_threads)  # numba stores it per thread, and this one may be new
        if rows != self._rows.count:  # most steps have as many rows as the one before
            self._rows = self.buffers.first(rows)
        self._batch = batch
        self._attention = {
            window: self.plan_attention(
                batch.row_starts, batch.positions, batch.block_tables, window or NO_WINDOW
            )
            for window in self._windows
        }
        hidden = self._rows.hidden
        gather_columns(self.embedding.table, batch.token_ids, hidden)
        if self.spec.embedding_scale != 1.0:
            hidden *= np.float32(self.spec.embedding_scale)
        return hidden

    def plan_attention(
        self, row_starts: np.ndarray, positions: np.ndarray, block_tables: np.ndarray,
        window: int = NO_WINDOW,
    ) -> Plain:  # fmt: skip
        """Return a step's attention in layers of this window for the kernels: an `Attended`."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        plan = plan_attention(
            row_starts, positions, spec.num_kv_heads, group, self.num_threads, window
        )
        parts = self.buffers.parts.first(PART_ROWS)
        return tuple(Attended(positions, block_tables, window, plan.items, plan.merges, parts))

    def run_layer(self, index: int, hidden: np.ndarray) -> None:
        layer, experts, rows = self._layers[index], self._experts[index], self._rows
        slots, attention = self._batch.slots, self._attention[self.spec.window_of(index)]
        with KERNEL_LOCK:
            if experts is None:
                whole_layer(hidden, layer, slots, attention, rows.of_layer)
            else:
                whole_expert_layer(
                    hidden, layer, experts, slots, attention, rows.of_layer, rows.of_experts
                )

    def apply_final_norm(self, states: np.ndarray, out: np.ndarray) -> None:
        """Write `states` `[rows, hidden_size]` after the final norm into `out`."""
        with KERNEL_LOCK:
            rms_norm(states, self._final_norm, self.epsilon, out)

    def quantised_rows(self, count: int) -> np.ndarray:
        """Return the buffer of `count` rows in int8, empty where products take float32."""
        return self.buffers.quantised.first(count)

    def logits(self, hidden: np.ndarray, rows: np.ndarray) -> np.ndarray:
        buffers = self.buffers
        normed = buffers.final.first(len(rows))
        self.apply_final_norm(buffers.chosen.copy_rows(hidden, rows), normed)
        out, quantised = buffers.logits.first(len(rows)), self.quantised_rows(len(rows))
        with KERNEL_LOCK:
            if self.with_bytes:
                quantise_rows(normed, quantised, is_fine(self.head.table))
            table, num_threads = self.head.table, self.num_threads
            linear(normed, table, NONE_1D, NONE_2D, quantised, out, num_threads)
        return out
