"""A decoder of two small layers with random weights, in the interpreter and in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.runner.gpu.launches import AttentionShape, KVPool, Launches
from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import DecoderWeights, Form, Matrix, random_weights
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.spec.rope_spec import RopeSpec
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel, widened

SPEC = DecoderSpec(
    architecture="Qwen3ForCausalLM", num_layers=2, hidden_size=128, intermediate_size=256,
    num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=250, max_position=1024,
    rms_epsilon=1e-6, rope=RopeSpec(kind="default", theta=1e4), is_rope_interleaved=False,
    has_tied_embeddings=False, has_qkv_bias=False, has_output_bias=False, has_mlp_bias=False,
    has_head_norms=True,
)  # fmt: skip
BLOCK = 16
NUM_BLOCKS = 48
MAX_LEN = 256
PIECE = 32
SHAPE = AttentionShape(
    piece=PIECE, programs=5, few_programs=3, few_stages=2, tile_rows=16, tile_keys=16, chunk_rows=32
)


class TinyDecoder:
    """Random weights of SPEC and a pool of blocks whose unwritten slots are NaN."""

    def __init__(
        self, form: Form = Form.BF16, spec: DecoderSpec = SPEC, *, has_scales: bool = False
    ) -> None:
        self.device = InterpretedDevice()
        self.spec = spec
        card: Any = self.device
        self.weights: DecoderWeights = random_weights(
            card, InterpretedKernel, spec, MAX_LEN, 7, 0, form
        )
        slot_bytes = spec.head_dim + 4 if has_scales else 2 * spec.head_dim
        self.has_scales, self.piece_bytes = has_scales, spec.num_kv_heads * BLOCK * slot_bytes

    def launches(self, tile: Tile, shape: AttentionShape = SHAPE) -> Launches:
        """Return launches with one tile for every product, on a pool of its own."""
        memory = self.device.allocate(2 * self.spec.num_layers * NUM_BLOCKS * self.piece_bytes)
        pool = KVPool(memory.address, NUM_BLOCKS, BLOCK, self.piece_bytes, self.has_scales)

        def choose(num_rows: int, num_outputs: int, weights: Matrix) -> Tile:
            depth = tile.depth if weights.form is Form.BF16 else 128
            return replace(tile, depth=depth)

        return Launches(
            InterpretedKernel, self.device.properties, self.spec, self.weights, pool, shape,
            choose_product=choose, choose_gate_up=choose,
        )  # fmt: skip

    def floats(self, address: int, *shape: int) -> np.ndarray:
        """Return bfloat16 numbers at an address as float64."""
        raw = self.device.download(address, 2 * int(np.prod(shape)))
        return widened(np.frombuffer(raw, np.uint16)).reshape(shape).astype(np.float64)

    def matrix(self, weights: Matrix) -> np.ndarray:
        """Return a matrix of BF16 weights, float64."""
        return self.floats(weights.address, weights.num_outputs, weights.num_inputs)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after the last token, computed in float64 without any cache."""
        spec, weights = self.spec, self.weights
        table = self.floats(weights.embedding, spec.vocab_size, spec.hidden_size)
        hidden = spec.embedding_scale * table[tokens]
        calm = 1 / np.sqrt(2 * spec.num_layers)

        def added(rows: np.ndarray) -> np.ndarray:
            return calm * _normed(rows) if spec.has_output_norms else rows

        for layer in weights.layers:
            qkv = _normed(hidden) @ self.matrix(layer.qkv).T
            hidden = hidden + added(self._attended(qkv) @ self.matrix(layer.output).T)
            both = _normed(hidden) @ self.matrix(layer.gate_up).T
            gate, up = both[:, : spec.intermediate_size], both[:, spec.intermediate_size :]
            if spec.is_gelu:
                cubic = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
                gate = gate / 2 * (1 + np.tanh(cubic))
            else:
                gate = gate / (1 + np.exp(-gate))
            hidden = hidden + added(gate * up @ self.matrix(layer.down).T)
        found: np.ndarray = self.matrix(weights.head) @ _normed(hidden[-1:])[0]
        return found

    def _attended(self, qkv: np.ndarray) -> np.ndarray:
        spec = self.spec
        count, half, group = len(qkv), spec.head_dim // 2, spec.num_heads // spec.num_kv_heads
        raw = self.device.download(self.weights.angles[spec.rope], 4 * count * spec.head_dim)
        angles = np.frombuffer(raw, np.float32).reshape(count, 1, spec.head_dim)
        cosines, sines = angles[..., :half], angles[..., half:]
        heads = qkv.reshape(count, -1, spec.head_dim)
        turned = _normed(heads[:, : spec.num_heads + spec.num_kv_heads])
        low, high = turned[..., :half], turned[..., half:]
        turned = np.concatenate([low * cosines - high * sines, high * cosines + low * sines], -1)
        result = np.zeros((count, spec.num_heads, spec.head_dim))
        for head in range(spec.num_heads):
            keys = turned[:, spec.num_heads + head // group]
            scores = turned[:, head] @ keys.T * spec.score_scale
            scores = np.where(np.tril(np.ones((count, count))) > 0, scores, -np.inf)
            shares = np.exp(scores - scores.max(1, keepdims=True))
            shares /= shares.sum(1, keepdims=True)
            values = heads[:, spec.num_heads + spec.num_kv_heads + head // group]
            result[:, head] = shares @ values
        return result.reshape(count, -1)


def _normed(values: np.ndarray) -> np.ndarray:
    """Return RMS-normalised rows; other norms of the random weights are 1."""
    found: np.ndarray = values / np.sqrt((values * values).mean(-1, keepdims=True) + 1e-6)
    return found
