"""The launches of a layer's mixture of experts, behind the norm of its rows.

    product           with the gate of the experts, in float32
    gate_up, product  of the MLP that all rows share, where there is one
    choose_experts    each row's experts and their weights
    list_pairs        pairs of a row and an expert, by expert
    grouped_gate_up   gate and up of each pair
    grouped_product   down of each pair
    add_experts       a row's results, the shared MLP's, and the norm of the next layer

All grids are those of the number of rows: a graph is recorded before anyone knows which experts a
row is sent to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from engine.runner.gpu.cuda_driver import DeviceProperties
from engine.runner.gpu.experts.expert_tiles import (
    ExpertTiles,
    expert_tiles,
    gate_tile,
    most_tiles,
)
from engine.runner.gpu.kernels.experts import (
    choice,
    grouped_products,
    grouped_ranges,
    listing,
)
from engine.runner.gpu.launcher import BindableKernel, optional
from engine.runner.gpu.steps.step_memory import StepMemory
from engine.runner.gpu.tiles import Tile, num_ranges, suited
from engine.runner.gpu.weights import (
    SCALES,
    STRIP_INPUTS,
    ExpertWeights,
    Form,
    LayerWeights,
    Matrix,
    norm_type,
)
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec

Bound = Callable[[int], None]

_LISTED = 1024
"""Pairs that a program of the list looks at together."""

_CHOICE = {
    "products": "*fp32", "gate_bias": "*fp32", "bias": "*fp32", "positions": "*i32",
    "experts": "*i32", "weights": "*fp32", "least_sum": "fp32", "weight_scale": "fp32",
}  # fmt: skip
_LIST = {
    "experts": "*i32", "pairs": "*i32", "tiles": "*i32", "num_tiles": "*i32", "num_pairs": "i32",
    "tile_rows": "i32",
}  # fmt: skip
_GROUPED = {
    "x": "*bf16", "weights": "*bf16", "y": "*bf16", "tiles": "*i32", "num_tiles": "*i32",
    "pairs": "*i32", "biases": "*fp32",
}  # fmt: skip
_SUM = {
    "hidden": "*bf16", "results": "*bf16", "experts": "*i32", "weights": "*fp32", "shared": "*bf16",
    "normed": "*bf16", "epsilon": "fp32",
}  # fmt: skip

ChooseTiles = Callable[[int, ExpertMixture, Matrix, Matrix], ExpertTiles]


class DenseLaunches(Protocol):
    """What a mixture takes of its model's `Launches`."""

    def kernel(
        self, function: Any, types: Mapping[str, str], constants: Mapping[str, Any],
        num_warps: int, stages: int,
    ) -> BindableKernel:  # fmt: skip
        """Return a compiled kernel."""

    def product(
        self, x: int, weights: Matrix, y: int, num_rows: int, *, is_float: bool = False,
        tile: Tile | None = None,
    ) -> Bound:  # fmt: skip
        """Return y = x @ weights.T."""

    def gate_up(self, x: int, weights: Matrix, y: int, num_rows: int) -> Bound:
        """Return y = silu(gate) * up."""


class ExpertLaunches:
    """Makes the launches of one model's mixtures of experts."""

    def __init__(
        self, dense: DenseLaunches, card: DeviceProperties, spec: DecoderSpec,
        mixture: ExpertMixture, choose_tiles: ChooseTiles = expert_tiles,
    ) -> None:  # fmt: skip
        self._dense, self._card, self._spec, self._mixture = dense, card, spec, mixture
        self._choose_tiles = choose_tiles

    def layer(
        self, layer: LayerWeights, memory: StepMemory, num_rows: int, positions: int,
        following_norm: int,
    ) -> list[Bound]:  # fmt: skip
        """Return the launches of a layer behind the norm of its rows.

        `hidden` and `normed` are those of the next layer afterwards.
        """
        weights, normed = layer.experts, memory["normed"]
        assert weights is not None
        tiles, gate = self.tiles(num_rows, weights), weights.expert_gate
        found = [
            self._dense.product(
                normed, gate, memory["gate_products"], num_rows, is_float=True,
                tile=gate_tile(num_rows, gate),
            )
        ]  # fmt: skip
        if layer.down.num_outputs:
            activated = memory["activated"]
            found += [
                self._dense.gate_up(normed, layer.gate_up, activated, num_rows),
                self._dense.product(activated, layer.down, memory["shared"], num_rows),
            ]
        return [
            *found,
            self.choose(weights, memory, num_rows, positions),
            self.list_pairs(memory, num_rows, tiles),
            self.gate_up(normed, weights.gate_up, memory, num_rows, tiles, weights.gate_up_biases),
            self.down(
                memory["pair_activated"],
                weights.down,
                memory,
                num_rows,
                tiles,
                weights.down_biases,
            ),
            self.add(memory, num_rows, following_norm),
        ]

    def tiles(self, num_rows: int, weights: ExpertWeights) -> ExpertTiles:
        """Return the tiles of a step of so many rows, as this card can compute them."""
        gate_up, down = self._of_one(weights.gate_up), self._of_one(weights.down)
        chosen = self._choose_tiles(num_rows, self._mixture, gate_up, down)
        return ExpertTiles(
            suited(chosen.gate_up, self._card, 2, gate_up), suited(chosen.down, self._card, 1, down)
        )

    def _of_one(self, matrix: Matrix) -> Matrix:
        """Return the matrix of the first expert."""
        return replace(matrix, num_outputs=matrix.num_outputs // self._mixture.num_experts)

    def choose(
        self, weights: ExpertWeights, memory: StepMemory, num_rows: int, positions: int
    ) -> Bound:
        """Return the choice of each row's experts."""
        mixture = self._mixture
        constants: dict[str, Any] = {
            **self._experts(), "PARTS": weights.expert_gate.num_outputs // mixture.num_experts,
            "CHOSEN": mixture.num_chosen, "HAS_BIAS": weights.choice_bias != 0,
            "IS_NORMALISED": mixture.is_normalised, "IS_SIGMOID": mixture.is_sigmoid,
        }  # fmt: skip
        no_bias, gate_biases = optional("gate_bias", weights.gate_bias)
        constants |= no_bias
        if mixture.weight_scale == 1.0:
            constants["weight_scale"] = None
        # One warp: its lanes find a maximum without waiting for others.
        kernel = self._dense.kernel(choice.choose_experts, _CHOICE, constants, 1, 1)
        return kernel.bind(
            (num_rows,), memory["gate_products"], *gate_biases, weights.choice_bias,
            positions, memory["experts"], memory["expert_weights"], mixture.least_sum,
            *([] if mixture.weight_scale == 1.0 else [mixture.weight_scale]),
        )  # fmt: skip

    def _experts(self) -> dict[str, int]:
        count = self._mixture.num_experts
        return {"EXPERTS": count, "LANES": max(1 << (count - 1).bit_length(), 2)}

    def list_pairs(self, memory: StepMemory, num_rows: int, tiles: ExpertTiles) -> Bound:
        """Return the list of pairs by expert, in tiles of as many rows as `tiles` have."""
        constants = {**self._experts(), "SIZE": _LISTED}
        kernel = self._dense.kernel(listing.list_pairs, _LIST, constants, 4, 1)
        return kernel.bind(
            (self._mixture.num_experts,), memory["experts"], memory["pairs"], memory["tiles"],
            memory["num_tiles"], num_rows * self._mixture.num_chosen, tiles.rows,
        )  # fmt: skip

    def gate_up(
        self, x: int, weights: Matrix, memory: StepMemory, num_rows: int, tiles: ExpertTiles,
        biases: int = 0,
    ) -> Bound:  # fmt: skip
        """Return silu(gate) * up of each pair, or its `ClampedSwish`, in the order of the list."""
        return self._grouped(tiles.gate_up, x, weights, memory, num_rows, biases, is_gated=True)

    def down(
        self, x: int, weights: Matrix, memory: StepMemory, num_rows: int, tiles: ExpertTiles,
        biases: int = 0,
    ) -> Bound:  # fmt: skip
        """Return each pair's results, in the order of the pairs."""
        return self._grouped(tiles.down, x, weights, memory, num_rows, biases, is_gated=False)

    def _activation(self) -> dict[str, float | None]:
        """Return the constants of what gate and up become."""
        swish = self._mixture.clamped_swish
        if swish is None:
            return {"STEEPNESS": None, "LIMIT": None}
        return {"STEEPNESS": swish.steepness, "LIMIT": swish.limit}

    def _grouped(
        self, tile: Tile, x: int, weights: Matrix, memory: StepMemory, num_rows: int, biases: int,
        *, is_gated: bool,
    ) -> Bound:  # fmt: skip
        outputs = self._of_one(weights).num_outputs // (2 if is_gated else 1)
        constants: dict[str, Any] = {
            "N": outputs, "K": weights.num_inputs, "BM": tile.rows, "BN": tile.outputs,
        }  # fmt: skip
        no_biases, given = optional("biases", biases)
        constants |= no_biases
        chosen = {"CHOSEN": self._mixture.num_chosen, **self._activation()}
        types, scales = _GROUPED, list[int]()
        if weights.form is not Form.BF16:
            function = grouped_ranges.grouped_ranges
            types = _GROUPED | {"weights": "*u16", "scales": SCALES[weights.form]}
            scales = [weights.scales]
            constants |= chosen | {
                "RANGES": num_ranges(weights), "UNROLLED": tile.depth // STRIP_INPUTS,
                "FORM": int(weights.form), "IS_GATED": is_gated, "IS_TOGETHER": tile.is_together,
                "HAS_PTX": True,
            }  # fmt: skip
        elif is_gated:
            function = grouped_products.grouped_gate_up
            constants |= chosen | {"BK": tile.depth}
        else:
            function = grouped_products.grouped_product
            constants |= {"BK": tile.depth}
        kernel = self._dense.kernel(function, types, constants, tile.num_warps, tile.stages)
        return kernel.bind(
            self._grid(num_rows, tile, outputs), x, weights.address, *scales,
            memory["pair_activated" if is_gated else "pair_results"], memory["tiles"],
            memory["num_tiles"], memory["pairs"], *given,
        )  # fmt: skip

    def _grid(self, num_rows: int, tile: Tile, outputs: int) -> tuple[int]:
        """Return a program for each tile of outputs of as many tiles of pairs as there can be."""
        mixture = self._mixture
        num_pairs = num_rows * mixture.num_chosen
        most = most_tiles(num_pairs, mixture.num_experts, tile.rows)
        return (most * -(-outputs // tile.outputs),)

    def add(self, memory: StepMemory, num_rows: int, following_norm: int) -> Bound:
        """Return the sum of each row's results, and its norm."""
        mixture, size = self._mixture, self._spec.hidden_size
        constants = {
            "N": size, "COLUMNS": 1 << (size - 1).bit_length(), "EXPERTS": mixture.num_experts,
            "CHOSEN": mixture.num_chosen, "HAS_SHARED": mixture.shared_size > 0,
        }  # fmt: skip
        types = _SUM | {"norm_weight": norm_type(self._spec)}
        kernel = self._dense.kernel(choice.add_experts, types, constants, 8, 1)
        return kernel.bind(
            (num_rows,), memory["hidden"], memory["pair_results"], memory["experts"],
            memory["expert_weights"], memory["shared"], following_norm, memory["normed"],
            self._spec.rms_epsilon,
        )  # fmt: skip
