"""The model that all stages measure, of an 8B model's shape, and what they find."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from engine.runner.gpu.kernels.random_numbers import fill_normal
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import AttentionShape, KVPool, Launches
from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import DecoderWeights, Form, random_weights
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.spec.rope_spec import RopeSpec

QWEN3_8B = DecoderSpec(
    architecture="Qwen3ForCausalLM", num_layers=36, hidden_size=4096, intermediate_size=12288,
    num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151936, max_position=40960,
    rms_epsilon=1e-6, rope=RopeSpec(kind="default", theta=1e6), is_rope_interleaved=False,
    has_tied_embeddings=False, has_qkv_bias=False, has_output_bias=False, has_mlp_bias=False,
    has_head_norms=True,
)  # fmt: skip
BLOCK = 64
NUM_BLOCKS = 2304
MAX_LEN = 34816
CONTEXT = 1000
PIECE = AttentionShape().piece


_NORMS = (
    "input_norm", "query_norm", "key_norm", "attended_norm", "middle_norm", "mlp_output_norm",
)  # fmt: skip
_TABLES = ("all_", "products", "attention")


class Findings(dict[str, Any]):
    """What stages found; `summary` leaves out the tables, which are printed as they are found.

    Where a command's output is cut, its end is kept: the summary has to leave room for errors.
    """

    def summary(self) -> dict[str, Any]:
        return {key: value for key, value in self.items() if not key.startswith(_TABLES)}


class Checks:
    """Comparisons of a stage: each is made, whichever of the others fail."""

    def __init__(self) -> None:
        self._failed: list[str] = []

    @contextmanager
    def check(self, what: str) -> Iterator[None]:
        """Keep an `AssertionError` for the end. An error of the driver is raised at once."""
        try:
            yield
        except AssertionError as error:
            self._failed.append(f"{what}: {str(error)[:400]}")
            print(f"{what}: WRONG\n{traceback.format_exc()}", flush=True)

    def end(self) -> None:
        """Raise `AssertionError` if one has failed."""
        assert not self._failed, self._failed


class Model:
    """The 8B model on the card, made at its first use and shared by all stages."""

    made: Model | None = None

    def __init__(self, card: Any) -> None:
        spec = QWEN3_8B
        self.weights: DecoderWeights = random_weights(
            card.device, card.kernel, spec, MAX_LEN, 1, card.stream
        )
        self.others: dict[Form, DecoderWeights] = {}
        self.piece_bytes = 2 * spec.num_kv_heads * BLOCK * spec.head_dim
        size = 2 * spec.num_layers * NUM_BLOCKS * self.piece_bytes
        memory = card.device.allocate(size)
        self.pool = KVPool(memory.address, NUM_BLOCKS, BLOCK, self.piece_bytes)
        types = {"out": "*bf16", "seed": "i64", "scale": "fp32", "count": "i64"}
        fill = card.kernel(KernelSpec(fill_normal, types, {"SIZE": 1024}))
        fill.bind((-(-size // 8192),), memory.address, 99, 1.0, size // 2)(card.stream)
        card.device.synchronize(card.stream)

    @classmethod
    def of(cls, card: Any) -> Model:
        if cls.made is None or not card.is_real:
            made = cls(card)
            if not card.is_real:
                return made
            cls.made = made
        return cls.made

    def stored(self, card: Any, form: Form) -> DecoderWeights:
        """Return weights in a form, made at its first use."""
        if form is Form.BF16:
            return self.weights
        if form not in self.others:
            self.others[form] = random_weights(
                card.device, card.kernel, QWEN3_8B, MAX_LEN, 1, card.stream, form
            )
        return self.others[form]

    def launches(
        self, card: Any, shape: AttentionShape | None = None, form: Form = Form.BF16,
        windows: tuple[int, ...] = (), sinks: int = 0, norms: int = 0, **options: Any,
    ) -> Launches:  # fmt: skip
        """Return launches; `sinks` is the address of those of all layers, 0: there are none.

        `norms` is the address of float32 [hidden], the weights of all norms of a model with what
        Gemma 3 has of its own; 0: of one without.
        """
        weights = self.stored(card, form)
        spec = replace(QWEN3_8B, windows=windows, has_sinks=sinks != 0)
        if norms:
            spec = replace(
                spec, embedding_scale=8.0, is_gelu=True, has_output_norms=True,
                has_norm_offsets=True,
            )  # fmt: skip
            own: dict[str, Any] = dict.fromkeys(_NORMS, norms)
            layers = tuple(replace(layer, **own) for layer in weights.layers)
            weights = replace(weights, layers=layers, final_norm=norms)
        layers = tuple(replace(layer, sinks=sinks) for layer in weights.layers)
        return Launches(
            card.kernel,
            card.device.properties,
            spec,
            replace(weights, layers=layers),
            self.pool,
            shape or AttentionShape(),
            **options,
        )


def rows_and_results(card: Any) -> tuple[Any, Any]:
    """Return random rows, and room for results."""
    x = card.device.allocate(4096 * 12288 * 2)
    y = card.device.allocate(4096 * 12288 * 4)
    if card.is_real:
        types = {"out": "*bf16", "seed": "i64", "scale": "fp32", "count": "i64"}
        fill = card.kernel(KernelSpec(fill_normal, types, {"SIZE": 1024}))
        fill.bind((4096 * 12288 // 4096,), x.address, 5, 1.0, 4096 * 12288)(card.stream)
    return x, y


def tile_name(tile: Tile) -> str:
    return (
        f"{tile.rows}x{tile.outputs}x{tile.depth} w{tile.num_warps} s{tile.stages}"
        f"{' tma' if tile.is_described else ''}{' together' if tile.is_together else ''}"
    )
