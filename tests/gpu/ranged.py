"""Launches of the products whose inputs are divided into fixed ranges (`ranged_kernels`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.runner.gpu.launches import Bound, Launches
from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import GROUP_INPUTS, Form, Matrix
from tests.gpu import ranged_kernels

MOST_ROWS = 128
_TYPES = {
    "x": "*bf16", "y": "*bf16", "residual": "*bf16", "partials": "*fp32", "counters": "*i32",
    "num_rows": "i32",
}  # fmt: skip
_STORED = {
    Form.FP8: {"weights": "*fp8e4nv", "scales": "*fp32"},
    Form.INT4: {"weights": "*u8", "scales": "*bf16"},
}
_GROUP = 8


@dataclass(frozen=True, slots=True)
class Ranged:
    """One way to compute a product: who computes a range, and in which tile."""

    how: str
    """A kernel of `ranged_kernels`: together, apart or in_turn."""
    rows: int
    outputs: int
    ranges: int
    num_warps: int
    stages: int
    unrolled: int = 1
    prefetch: int = 512
    has_ptx: bool = True

    def __str__(self) -> str:
        return (
            f"{self.how} {self.rows}x{self.outputs} r{self.ranges} w{self.num_warps}"
            f" s{self.stages} u{self.unrolled}"
        )

    def fits(self, num_inputs: int) -> bool:
        """Whether every range holds whole rounds of groups."""
        return num_inputs % (self.ranges * self.unrolled * GROUP_INPUTS) == 0

    def constants(self, num_outputs: int, weights: Matrix, is_gated: bool) -> dict[str, Any]:
        """Return the kernel's constants but for the residual."""
        function = getattr(ranged_kernels, self.how)
        ahead = min(self.prefetch, weights.num_inputs // self.ranges)
        known = {
            "N": num_outputs, "K": weights.num_inputs, "BM": self.rows, "BN": self.outputs,
            "GROUP": _GROUP, "RANGES": self.ranges, "UNROLLED": self.unrolled,
            "FORM": int(weights.form), "IS_GATED": is_gated, "PREFETCH": ahead,
            "HAS_PTX": self.has_ptx, "MOST_ROWS": MOST_ROWS,
        }  # fmt: skip
        return {name: value for name, value in known.items() if name in function.arg_names}


class RangedLaunches(Launches):
    """A decoder's launches whose quantised products are computed in the ways that are chosen."""

    def __init__(
        self,
        *given: Any,
        scratch: tuple[int, int],
        choose: Callable[[int, Matrix, bool], Ranged | None],
        **options: Any,
    ) -> None:
        """`scratch`: addresses of 2 x 8 x MOST_ROWS x 12,288 float32 and of counters that are 0."""
        super().__init__(*given, **options)
        self._scratch, self._choose = scratch, choose

    def product(
        self, x: int, weights: Matrix, y: int, num_rows: int, *, residual: int = 0,
        is_float: bool = False, tile: Tile | None = None,
    ) -> Bound:  # fmt: skip
        way = self._choose(num_rows, weights, False)
        if way is None or weights.form is Form.BF16:
            return super().product(
                x, weights, y, num_rows, residual=residual, is_float=is_float, tile=tile
            )
        return self.ranged(way, x, weights, y, num_rows, residual)

    def gate_up(
        self, x: int, weights: Matrix, y: int, num_rows: int, tile: Tile | None = None
    ) -> Bound:
        way = self._choose(num_rows, weights, True)
        if way is None or weights.form is Form.BF16:
            return super().gate_up(x, weights, y, num_rows, tile)
        return self.ranged(way, x, weights, y, num_rows, is_gated=True)

    def ranged(
        self, way: Ranged, x: int, weights: Matrix, y: int, num_rows: int, residual: int = 0,
        is_gated: bool = False,
    ) -> Bound:  # fmt: skip
        """Return a product, or silu(gate) * up, computed in a given way."""
        num_outputs = weights.num_outputs // (2 if is_gated else 1)
        constants = way.constants(num_outputs, weights, is_gated)
        constants["HAS_RESIDUAL"] = residual != 0
        types = {**_TYPES, **_STORED[weights.form]}
        kernel = self.kernel(
            getattr(ranged_kernels, way.how), types, constants, way.num_warps, way.stages
        )
        tiles = -(-num_rows // way.rows) * -(-num_outputs // way.outputs)
        grid = (tiles, way.ranges) if way.how == "apart" else (tiles,)
        extra = self._scratch if way.how == "apart" else ()
        return kernel.bind(
            grid, x, weights.address, weights.scales, y, residual, *extra, num_rows
        )  # fmt: skip
