"""The decoder on CPU kernels, in float32, on weights packed for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numba import get_num_threads, njit, set_num_threads

from common.errors import ConfigError
from engine.runner.checkpoint import Checkpoint
from engine.runner.flat_batch import FlatBatch
from engine.runner.kernels.attention import paged_attention, plan_items
from engine.runner.kernels.matmul import (
    gated_linear,
    gather_columns,
    linear,
    pack_rows,
    rms_norm,
)
from engine.runner.kernels.rotary import rotate_and_store
from engine.runner.kernels.vector_ir import LANES
from engine.runner.kv_cache import KVCache
from engine.runner.model_spec import DecoderSpec
from engine.runner.rope import halves_first, rotary_tables

_NONE_1D = np.zeros(0, np.float32)
_NONE_2D = np.zeros((0, 0), np.float32)
_ALIGNMENT_BYTES = 64


def unsupported_size(spec: DecoderSpec) -> str:
    """Which size the kernels' sixteen lanes do not divide, in words; empty when all are."""
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        size = getattr(spec, name)
        if size % LANES:
            return f"{name} is {size}: the CPU kernels want a multiple of {LANES}"
    return ""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's packed weights; empty arrays stand for what the family does not have."""

    input_norm: np.ndarray
    qkv: np.ndarray
    qkv_bias: np.ndarray
    head_norms: np.ndarray
    output: np.ndarray
    output_bias: np.ndarray
    mlp_norm: np.ndarray
    gate_up: np.ndarray
    gate_up_bias: np.ndarray
    down: np.ndarray
    down_bias: np.ndarray
    keys: np.ndarray
    values: np.ndarray


@dataclass(slots=True)
class _Workspace:
    """Buffers of one step, `[rows, …]` each."""

    batch: FlatBatch
    items: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    attended: np.ndarray
    gated: np.ndarray


@njit(nogil=True, cache=True, error_model="numpy")
def _attention_half(  # type: ignore[no-untyped-def]
    hidden, norm, epsilon, qkv_panels, qkv_bias, head_norms, cosines, sines, scale, output_panels,
    output_bias, keys, values, positions, slots, block_tables, items, normed, qkv, attended,
    num_threads,
) -> None:  # fmt: skip
    """`hidden += output(attention(rotary(qkv(norm(hidden)))))`."""
    rows = hidden.shape[0]
    head_dim = keys.shape[3]
    rms_norm(hidden, norm, epsilon, normed)
    linear(normed, qkv_panels, qkv_bias, hidden[:0], qkv, num_threads)
    heads = qkv.reshape((rows, qkv.shape[1] // head_dim, head_dim))
    rotate_and_store(
        heads, head_norms, epsilon, cosines, sines, positions, scale, slots, keys, values
    )
    out = attended.reshape((rows, attended.shape[1] // head_dim, head_dim))
    paged_attention(heads, keys, values, block_tables, positions, items, out, num_threads)
    linear(attended, output_panels, output_bias, hidden, hidden, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def _mlp_half(  # type: ignore[no-untyped-def]
    hidden, norm, epsilon, gate_up_panels, gate_up_bias, down_panels, down_bias, normed, gated,
    num_threads,
) -> None:  # fmt: skip
    """`hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))`."""
    rms_norm(hidden, norm, epsilon, normed)
    gated_linear(normed, gate_up_panels, gate_up_bias, gated, num_threads)
    linear(gated, down_panels, down_bias, hidden, hidden, num_threads)


class NumbaDecoder:
    """See `decoder.Decoder`. One thread at a time may use all of a process's instances.

    numba's simplest thread pool ends the process when two threads enter it at once, so a lock
    shared by all instances is held around everything parallel.
    """

    _lock = threading.Lock()

    def __init__(
        self, spec: DecoderSpec, checkpoint: Checkpoint, cache: KVCache, max_len: int
    ) -> None:
        problem = unsupported_size(spec)
        if problem:
            raise ConfigError(f"attention_backend is numba, but {problem}; wanted paddle")
        self.num_layers = spec.num_layers
        self._spec = spec
        self._num_threads = get_num_threads()
        self._epsilon = np.float32(spec.rms_epsilon)
        self._scale = np.float32(spec.head_dim**-0.5)
        self._cosines, self._sines = rotary_tables(spec, max_len)
        self._kv = cache.as_numpy()
        with self._lock:
            self._embedding = _pack(checkpoint, ["model.embed_tokens.weight"])
            self._head = self._embedding
            if not spec.has_tied_embeddings:
                self._head = _pack(checkpoint, ["lm_head.weight"])
            self._final_norm = checkpoint.read("model.norm.weight")
            self._layers = [self._load_layer(checkpoint, i) for i in range(spec.num_layers)]

    def _load_layer(self, checkpoint: Checkpoint, index: int) -> _Layer:
        spec, prefix = self._spec, f"model.layers.{index}."
        qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        rotated = spec.head_dim if spec.is_rope_interleaved else 0
        head_norms = _NONE_2D
        if spec.has_head_norms:
            norms = [checkpoint.read(f"{prefix}self_attn.{n}_norm.weight") for n in "qk"]
            head_norms = np.stack([halves_first(n, rotated) if rotated else n for n in norms])
        gate_up = [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]
        output, down = f"{prefix}self_attn.o_proj", f"{prefix}mlp.down_proj"
        gate_up_bias = _NONE_1D
        if spec.has_mlp_bias:
            biases = [checkpoint.read(f"{name}.bias").reshape(-1, LANES) for name in gate_up]
            gate_up_bias = np.stack(biases, axis=1).reshape(-1)
        return _Layer(
            input_norm=checkpoint.read(f"{prefix}input_layernorm.weight"),
            qkv=_pack(checkpoint, [f"{name}.weight" for name in qkv], rotated),
            qkv_bias=_biases(checkpoint, qkv, rotated) if spec.has_qkv_bias else _NONE_1D,
            head_norms=head_norms,
            output=_pack(checkpoint, [f"{output}.weight"]),
            output_bias=_biases(checkpoint, [output]) if spec.has_output_bias else _NONE_1D,
            mlp_norm=checkpoint.read(f"{prefix}post_attention_layernorm.weight"),
            gate_up=_pack(checkpoint, [f"{name}.weight" for name in gate_up], is_alternating=True),
            gate_up_bias=gate_up_bias,
            down=_pack(checkpoint, [f"{down}.weight"]),
            down_bias=_biases(checkpoint, [down]) if spec.has_mlp_bias else _NONE_1D,
            keys=self._kv[index, 0],
            values=self._kv[index, 1],
        )

    def begin(self, batch: FlatBatch) -> np.ndarray:
        spec = self._spec
        rows = batch.token_ids.size
        set_num_threads(self._num_threads)  # numba keeps it per thread, and this one may be new

        def buffer(width: int) -> np.ndarray:
            return np.empty((rows, width), np.float32)

        self._work = _Workspace(
            batch=batch,
            items=plan_items(
                batch.row_starts,
                batch.positions,
                spec.num_kv_heads,
                spec.num_heads // spec.num_kv_heads,
            ),
            normed=buffer(spec.hidden_size),
            qkv=buffer(spec.qkv_size),
            attended=buffer(spec.num_heads * spec.head_dim),
            gated=buffer(spec.intermediate_size),
        )
        hidden = buffer(spec.hidden_size)
        gather_columns(self._embedding, batch.token_ids, hidden)
        return hidden

    def run_layer(self, index: int, hidden: np.ndarray) -> None:
        layer, work, epsilon = self._layers[index], self._work, self._epsilon
        batch, num_threads = work.batch, self._num_threads
        with self._lock:
            _attention_half(
                hidden, layer.input_norm, epsilon, layer.qkv, layer.qkv_bias, layer.head_norms,
                self._cosines, self._sines, self._scale, layer.output, layer.output_bias,
                layer.keys, layer.values, batch.positions, batch.slots, batch.block_tables,
                work.items, work.normed, work.qkv, work.attended, num_threads,
            )  # fmt: skip
            _mlp_half(
                hidden, layer.mlp_norm, epsilon, layer.gate_up, layer.gate_up_bias, layer.down,
                layer.down_bias, work.normed, work.gated, num_threads,
            )  # fmt: skip

    def logits(self, hidden: np.ndarray, rows: np.ndarray) -> np.ndarray:
        chosen = hidden[rows]
        normed = np.empty_like(chosen)
        out = np.empty((len(rows), self._spec.vocab_size), np.float32)
        with self._lock:
            rms_norm(chosen, self._final_norm, self._epsilon, normed)
            linear(normed, self._head, _NONE_1D, _NONE_2D, out, self._num_threads)
        return out


def _pack(
    checkpoint: Checkpoint, names: list[str], rotated: int = 0, *, is_alternating: bool = False
) -> np.ndarray:
    """One packed weight from several with equal inputs, one after the other or in turns.

    With `rotated`, a head size, the first two (query and key) have their heads' halves put first.
    """
    sizes = [checkpoint.shape(name)[0] for name in names]
    num_inputs = checkpoint.shape(names[0])[1]
    panels = _aligned_zeros((-(-sum(sizes) // LANES), num_inputs, LANES))
    first = 0
    for i, name in enumerate(names):
        weight = checkpoint.read(name)
        if rotated and i < 2:
            weight = halves_first(weight, rotated)
        pack_rows(
            weight, panels, i if is_alternating else first, len(names) if is_alternating else 1
        )
        first += sizes[i] // LANES
    return panels


def _biases(checkpoint: Checkpoint, names: list[str], rotated: int = 0) -> np.ndarray:
    biases = [checkpoint.read(f"{name}.bias") for name in names]
    if rotated:
        biases[:2] = [halves_first(bias, rotated) for bias in biases[:2]]
    return np.concatenate(biases)


def _aligned_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros that start on a cache line, so that no vector of a panel straddles two."""
    size_bytes = int(np.prod(shape)) * 4
    raw = np.zeros(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + size_bytes].view(np.float32).reshape(shape)
