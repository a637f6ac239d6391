"""The launches of a decoder's steps: kernels chosen and compiled once, arguments put in place.

Both kinds of step have the same nine launches a layer but for attention: the product of query, key
and value; norms, rotation and the write into the cache; attention (pieces and their merge, or a
chunk); the output product with its residual; a norm; gate and up; down with its residual; the next
norm. `experts/` has those of a mixture behind the first norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.runner.gpu.attention_launches import AttentionLaunches
from engine.runner.gpu.cuda_driver import PROGRAMMATIC_GRAPHS_CUDA, DeviceProperties
from engine.runner.gpu.experts.expert_launches import ExpertLaunches
from engine.runner.gpu.kernels import draw, products, ranged_products, rows
from engine.runner.gpu.launcher import BindableKernel, KernelSpec, optional
from engine.runner.gpu.steps.step_memory import StepMemory
from engine.runner.gpu.tensor_map import MatrixView
from engine.runner.gpu.tiles import Tile, gate_up_tile, num_ranges, product_tile, suited
from engine.runner.gpu.weights import (
    SCALES,
    STRIP_INPUTS,
    DecoderWeights,
    Form,
    Matrix,
    norm_type,
)
from engine.runner.weights.spec.model_spec import DecoderSpec

Bound = Callable[[int], None]
"""Launches a kernel with its arguments on a stream."""

DRAW_SLICE = 2048
_GROUP = 8
_ROTATED_ROWS = 8

_PRODUCT = {
    "x": "*bf16", "weights": "*bf16", "y": "*bf16", "residual": "*bf16", "bias": "*fp32",
    "num_rows": "i32", "stored": "*bf16",
}  # fmt: skip
_QUANTISED = _PRODUCT | {"weights": "*u16"}
_ROWS = {
    "tokens": "*i32", "sources": "*i32", "drawn": "*i32", "table": "*bf16", "scale": "fp32",
    "hidden": "*bf16", "normed": "*bf16", "epsilon": "fp32",
}  # fmt: skip
_ROTATE = {
    "qkv": "*bf16", "bias": "*bf16", "angles": "*fp32", "positions": "*i32", "slots": "*i32",
    "queries": "*bf16", "keys": "*bf16", "values": "*bf16", "key_scales": "*fp32",
    "value_scales": "*fp32", "divisors": "*fp32", "epsilon": "fp32", "num_rows": "i32",
}  # fmt: skip
_DRAW = {
    "logits": "*fp32", "temperatures": "*fp32", "seeds": "*i64", "indices": "*i32",
    "best_scores": "*fp64", "best_tokens": "*i32", "slices": "i32", "tokens": "*i32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How attention is divided. `piece` enters the bits; the rest does not."""

    piece: int = 256
    programs: int = 396
    few_programs: int = 132
    """Programs while at most FEW_SEQUENCES decode, one on each multiprocessor."""
    tile_rows: int = 16
    tile_keys: int = 64
    num_warps: int = 4
    stages: int = 3
    few_stages: int = 7
    max_registers: int = 0
    """Most registers a thread of a decoding step's attention may have; 0: no bound."""
    chunk_rows: int = 128
    chunk_warps: int = 8
    chunk_stages: int = 3


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values: [layers, 2, blocks, KV heads, block_size, head_dim] at `address`.

    With scales a number is a byte; `kernels/slots.py` has the layout of a head of a block.
    """

    address: int
    num_blocks: int
    block_size: int
    piece_bytes: int
    """Bytes of one block's keys (or values) in one layer."""
    has_scales: bool = False

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of a key or value."""
        return 1 if self.has_scales else 2

    def keys(self, layer: int) -> int:
        return self.address + 2 * layer * self.num_blocks * self.piece_bytes

    def values(self, layer: int) -> int:
        return self.keys(layer) + self.num_blocks * self.piece_bytes


class Launches:
    """Makes the launches of one model on one card; equal kernels are compiled once."""

    def __init__(
        self,
        make_kernel: Callable[[KernelSpec], BindableKernel],
        card: DeviceProperties,
        spec: DecoderSpec,
        weights: DecoderWeights,
        pool: KVPool,
        shape: AttentionShape,
        *,
        is_programmatic: bool = True,
        choose_product: Callable[[int, int, Matrix], Tile] = product_tile,
        choose_gate_up: Callable[[int, int, Matrix], Tile] = gate_up_tile,
    ) -> None:
        self.spec, self.shape, self.pool, self.weights = spec, shape, pool, weights
        self._make_kernel, self._card = make_kernel, card
        # Cards before compute capability 9.0 start a kernel when its predecessor has ended, and
        # older drivers record no other launches.
        is_known = card.capability >= 90 and card.cuda >= PROGRAMMATIC_GRAPHS_CUDA
        self._is_programmatic = is_programmatic and is_known
        self._choose_product, self._choose_gate_up = choose_product, choose_gate_up
        self._kernels: dict[tuple[Any, ...], BindableKernel] = {}
        self.attention = AttentionLaunches(self, card)
        mixture = spec.experts
        self.experts = None if mixture is None else ExpertLaunches(self, card, spec, mixture)

    def kernel(
        self, function: Any, types: Mapping[str, str], constants: Mapping[str, Any],
        num_warps: int, stages: int, max_registers: int = 0,
    ) -> BindableKernel:  # fmt: skip
        """Return the compiled kernel, programmatic as the whole step is."""
        values = {**constants, "IS_PROGRAMMATIC": self._is_programmatic}
        options = {"maxnreg": max_registers} if max_registers else {}
        key = (
            function.__name__, tuple(types.items()), tuple(values.items()), num_warps, stages,
            max_registers,
        )  # fmt: skip
        if key not in self._kernels:
            spec = KernelSpec(
                function, types, values, num_warps, stages, options=options,
                is_programmatic=self._is_programmatic,
            )  # fmt: skip
            self._kernels[key] = self._make_kernel(spec)
        return self._kernels[key]

    def product(
        self, x: int, weights: Matrix, y: int, num_rows: int, *, residual: int = 0, bias: int = 0,
        is_float: bool = False, tile: Tile | None = None,
    ) -> Bound:  # fmt: skip
        """Return y = x @ weights.T, plus the bias and the residual if they are given.

        y is bfloat16 or float32, and the bias float32.
        """
        tile = tile or self._choose_product(num_rows, weights.num_outputs, weights)
        result = {"y": "*fp32"} if is_float else {}
        if weights.form is not Form.BF16:
            return self._ranged(tile, x, weights, (y, residual), num_rows, result, bias=bias)
        types = _PRODUCT | result
        no_bias, biases = optional("bias", bias)
        constants = {"HAS_RESIDUAL": residual != 0, **no_bias}
        return self._product(
            products.product, products.described_product, types, constants, tile, x, weights,
            (y, residual, *biases), num_rows, weights.num_outputs,
        )  # fmt: skip

    def gate_up(
        self, x: int, weights: Matrix, y: int, num_rows: int, tile: Tile | None = None
    ) -> Bound:
        """Return y = silu(gate) * up, or gelu(gate) * up."""
        num_outputs = weights.num_outputs // 2
        tile = tile or self._choose_gate_up(num_rows, num_outputs, weights)
        if weights.form is not Form.BF16:
            return self._ranged(tile, x, weights, (y, 0), num_rows, {}, is_gated=True)
        return self._product(
            products.gate_up_product, products.described_gate_up, _PRODUCT,
            {"IS_GELU": self.spec.is_gelu}, tile, x, weights, (y,), num_rows, num_outputs,
        )  # fmt: skip

    def _product(
        self, plain: Any, described: Any, types: Mapping[str, str], constants: dict[str, Any],
        tile: Tile, x: int, weights: Matrix, results: tuple[int, ...], num_rows: int,
        num_outputs: int,
    ) -> Bound:  # fmt: skip
        tile = suited(tile, self._card, weights.num_outputs // num_outputs, weights)
        grid = (tile.programs(num_rows, num_outputs),)
        constants |= {
            "N": num_outputs, "K": weights.num_inputs, "BM": tile.rows, "BN": tile.outputs,
            "BK": tile.depth, "GROUP": _GROUP, "PREFETCH": tile.words_ahead(weights.form),
        }  # fmt: skip
        if not tile.is_described:
            kernel = self.kernel(plain, types, constants, tile.num_warps, tile.stages)
            return kernel.bind(grid, x, weights.address, *results, num_rows)
        types = {
            **types,
            "x": f"tensordesc<bf16[{tile.rows},{tile.depth}]>",
            "weights": f"tensordesc<bf16[{tile.outputs},{tile.depth}]>",
        }
        kernel = self.kernel(described, types, constants, tile.num_warps, tile.stages)
        return kernel.bind(
            grid, MatrixView(x, num_rows, weights.num_inputs),
            MatrixView(weights.address, weights.num_outputs, weights.num_inputs), *results,
            num_rows, weights.address,
        )  # fmt: skip

    def _ranged(
        self, tile: Tile, x: int, weights: Matrix, results: tuple[int, int], num_rows: int,
        result: Mapping[str, str], *, bias: int = 0, is_gated: bool = False,
    ) -> Bound:  # fmt: skip
        """Return a product of quantised weights, whose inputs are in ranges."""
        width = 2 if is_gated else 1
        num_outputs = weights.num_outputs // width
        tile = suited(tile, self._card, width, weights)
        no_bias, biases = optional("bias", bias)
        function = ranged_products.ranges_in_turn
        if tile.is_together:
            function = ranged_products.ranges_together
        constants = {
            "N": num_outputs, "K": weights.num_inputs, "BM": tile.rows, "BN": tile.outputs,
            "GROUP": _GROUP, "RANGES": self.num_ranges(weights),
            "UNROLLED": tile.depth // STRIP_INPUTS, "FORM": int(weights.form),
            "IS_GATED": is_gated, "IS_GELU": is_gated and self.spec.is_gelu,
            "HAS_RESIDUAL": results[1] != 0,
            "PREFETCH": tile.words_ahead(weights.form), "HAS_PTX": True, **no_bias,
        }  # fmt: skip
        types = {**_QUANTISED, "scales": SCALES[weights.form], **result}
        kernel = self.kernel(function, types, constants, tile.num_warps, tile.stages)
        grid = (tile.programs(num_rows, num_outputs),)
        return kernel.bind(grid, x, weights.address, weights.scales, *results, *biases, num_rows)

    def num_ranges(self, weights: Matrix) -> int:
        """Return the number of ranges of a quantised product's inputs: it enters the bits."""
        return num_ranges(weights)

    def layers(
        self, memory: StepMemory, num_rows: int, positions: int,
        attend: Callable[[int], Sequence[Bound]],
    ) -> list[Bound]:  # fmt: skip
        """Return all layers of a step whose slots are in `memory`."""
        slots = memory["slots"]
        return [
            launch
            for index in range(self.spec.num_layers)
            for launch in self.layer(index, memory, num_rows, positions, slots, attend)
        ]

    def layer(
        self, index: int, memory: StepMemory, num_rows: int, positions: int, slots: int,
        attend: Callable[[int], Sequence[Bound]],
    ) -> list[Bound]:  # fmt: skip
        """Return one layer of a step; `attend` returns the attention of a layer.

        `normed` holds the norm of the layer's input, and then that of the next layer's, or of the
        head's.
        """
        normed, layers = memory["normed"], self.weights.layers
        layer = layers[index]
        following = self.weights.final_norm
        if index + 1 < len(layers):
            following = layers[index + 1].input_norm
        found = [
            self.product(normed, layer.qkv, memory["qkv"], num_rows),
            self.rotate(index, memory["qkv"], positions, slots, memory["queries"], num_rows),
            *attend(index),
            *self._add(
                memory["attended"], layer.output, memory, num_rows,
                (layer.attended_norm, layer.middle_norm), layer.output_bias,
            ),
        ]  # fmt: skip
        if self.experts is not None and layer.experts is not None:
            return found + self.experts.layer(layer, memory, num_rows, positions, following)
        return [
            *found,
            self.gate_up(normed, layer.gate_up, memory["activated"], num_rows),
            *self._add(
                memory["activated"], layer.down, memory, num_rows,
                (layer.mlp_output_norm, following),
            ),
        ]  # fmt: skip

    def _add(
        self, x: int, weights: Matrix, memory: StepMemory, num_rows: int, norms: tuple[int, int],
        bias: int = 0,
    ) -> list[Bound]:  # fmt: skip
        """Return hidden += x @ weights.T, and the norm of hidden.

        `norms`: the norm of what is added (0: it has none), and that of the sum. What has a norm
        of its own lies in `normed` until it is added, rounded as any product's results.
        """
        hidden, normed, (own, following) = memory["hidden"], memory["normed"], norms
        target, residual = (normed, 0) if own else (hidden, hidden)
        return [
            self.product(x, weights, target, num_rows, residual=residual, bias=bias),
            self.norm(hidden, following, normed, num_rows, own),
        ]

    def embed(
        self, tokens: int, hidden: int, normed: int, num_rows: int,
        drawn: tuple[int, int] | None = None,
    ) -> Bound:  # fmt: skip
        """Return the embedding of tokens, with the norm of the first layer.

        `drawn`: sources and tokens of the step before, which come first.
        """
        spec, scales = self.spec, list[float]()
        constants = {**self._columns(spec.hidden_size), "HAS_DRAWN": drawn is not None}
        if spec.embedding_scale == 1.0:
            constants["scale"] = None
        else:
            scales = [spec.embedding_scale]
        kernel = self.kernel(rows.embed, _ROWS | self._norms("weight"), constants, 8, 1)
        weight = self.weights.layers[0].input_norm
        return kernel.bind(
            (num_rows,), tokens, *(drawn or (0, 0)), self.weights.embedding, *scales, weight,
            hidden, normed, spec.rms_epsilon,
        )  # fmt: skip

    def norm(
        self, hidden: int, weight: int, normed: int, num_rows: int, added_weight: int = 0
    ) -> Bound:
        """Return the norm of rows, after those in `normed` are added to them.

        `added_weight`: the norm of the added rows; 0: none are added.
        """
        none_added, added = optional("added_weight", added_weight)
        types = _ROWS | self._norms("weight", "added_weight")
        constants = self._columns(self.spec.hidden_size) | none_added
        kernel = self.kernel(rows.norm, types, constants, 8, 1)
        return kernel.bind((num_rows,), hidden, weight, normed, *added, self.spec.rms_epsilon)

    def _norms(self, *names: str) -> dict[str, str]:
        """Return the types of these weights of norms."""
        return dict.fromkeys(names, norm_type(self.spec))

    @staticmethod
    def _columns(size: int) -> dict[str, Any]:
        return {"N": size, "COLUMNS": 1 << (size - 1).bit_length()}

    def heads(self) -> dict[str, int]:
        """Return the constants of kernels that tell heads apart."""
        spec = self.spec
        return {"HEADS": spec.num_heads, "KV_HEADS": spec.num_kv_heads, "DIM": spec.head_dim}

    def rotate(
        self, layer: int, qkv: int, positions: int, slots: int, queries: int, num_rows: int
    ) -> Bound:
        """Return norms and rotation of heads, with keys and values into the cache."""
        spec, weights = self.spec, self.weights.layers[layer]
        constants = {
            **self.heads(), "BLOCK": self.pool.block_size, "HAS_BIAS": weights.qkv_bias != 0,
            "HAS_NORMS": spec.has_head_norms, "HAS_SCALES": self.pool.has_scales,
            "HAS_DIVISORS": weights.key_divisors != 0, "TILE": _ROTATED_ROWS,
        }  # fmt: skip
        types = _ROTATE | self._norms("query_weight", "key_weight")
        types |= {"keys": "*i16", "values": "*i16"} if self.pool.has_scales else {}
        kernel = self.kernel(rows.rotate_and_store, types, constants, 4, 1)
        return kernel.bind(
            (-(-num_rows // _ROTATED_ROWS), spec.num_heads + 2 * spec.num_kv_heads), qkv,
            weights.qkv_bias, weights.query_norm, weights.key_norm, weights.key_divisors,
            self.weights.angles[spec.rope_of(layer)], positions, slots, queries,
            *self.cached(layer), spec.rms_epsilon, num_rows,
        )  # fmt: skip

    def cached(self, layer: int) -> tuple[int, int, int, int]:
        """Return the addresses of a layer's keys and values, and of their scales."""
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        return keys, values, keys, values

    @property
    def num_slices(self) -> int:
        """Slices of a row of logits; one program reads each."""
        return -(-self.spec.vocab_size // DRAW_SLICE)

    def draw_rows(
        self, logits: int, ways: tuple[int, int, int], best: tuple[int, int], tokens: int,
        num_rows: int,
    ) -> tuple[Bound, Bound]:  # fmt: skip
        """Return the draw of every row into `tokens`; `ways` are temperatures, seeds, indices."""
        find = self._draw_slices(logits, ways, best, num_rows)
        parts = 1 << (self.num_slices - 1).bit_length()
        choose = self.kernel(draw.choose, _DRAW, {"PARTS": parts}, 1, 1)
        return find, choose.bind((num_rows,), *best, self.num_slices, tokens)

    def _draw_slices(
        self, logits: int, ways: tuple[int, int, int], best: tuple[int, int], num_rows: int
    ) -> Bound:
        constants = {"VOCABULARY": self.spec.vocab_size, "SLICE": DRAW_SLICE}
        find = self.kernel(draw.draw_slices, _DRAW, constants, 4, 1)
        return find.bind((num_rows, self.num_slices), logits, *ways, *best, self.num_slices)
