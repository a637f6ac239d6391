"""The tiles of the experts' products, by how many rows an expert is sent on average.

A tile has pairs of one expert, so most tiles of a step are not full, and an expert's weights are
read once for each of its tiles. Tiles change the time and never the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.runner.gpu.tiles import Tile, fitted, product_tile, ranged_tile
from engine.runner.gpu.weights import Form, Matrix
from engine.runner.weights.spec.expert_mixture import ExpertMixture

TILE_BYTES = 16
"""Bytes of a tile in the list of a step (`kernels.experts.listing`)."""
LEAST_TILE_ROWS = 8
_ROW_LIMITS = (8, 16, 64, 256, 1024, 4096)
"""Rows up to which steps take the same tiles: kernels are compiled for each at the start."""
_GATE_ROWS = 256
_PLAIN = {
    16: (Tile(16, 32, 128, 4, 4), Tile(16, 32, 256, 4, 3)),
    32: (Tile(32, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4)),
    64: (Tile(64, 64, 128, 4, 4), Tile(64, 64, 128, 4, 4)),
    128: (Tile(128, 64, 64, 8, 4), Tile(128, 128, 64, 8, 4)),
}
"""Tiles of weights in bfloat16, by their rows: gate and up, and down. None was measured."""
_RANGED = {8: 8, 32: 32, 64: 1024}
"""Rows of a tile of quantised weights, and of a product of one matrix that takes such tiles.
Gate and up in tiles of 16 would spill registers on compute capability 8.0."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of a step; both have as many rows."""

    gate_up: Tile
    down: Tile

    @property
    def rows(self) -> int:
        """Pairs of a tile."""
        return self.down.rows


def expert_tiles(
    num_rows: int, mixture: ExpertMixture, gate_up: Matrix, down: Matrix
) -> ExpertTiles:
    """Return the tiles of a step of `num_rows` rows; the matrices are those of one expert."""
    most = next((limit for limit in _ROW_LIMITS if num_rows <= limit), _ROW_LIMITS[-1])
    each = most * mixture.num_chosen / mixture.num_experts
    forms = [_RANGED if one.form is not Form.BF16 else _PLAIN for one in (gate_up, down)]
    sizes = sorted(forms[0].keys() & forms[1].keys())
    rows = next((rows for rows in sizes if each <= rows), sizes[-1])
    return ExpertTiles(_tile(rows, gate_up, 0), _tile(rows, down, 1))


def _tile(rows: int, weights: Matrix, place: int) -> Tile:
    if weights.form is Form.BF16:
        return fitted(_PLAIN[rows][place], weights)
    return fitted(ranged_tile(_RANGED[rows], weights, 2 - place), weights)


def gate_tile(num_rows: int, gate: Matrix) -> Tile:
    """Return the tile of a gate's products: a larger one would leave most of a card idle."""
    return product_tile(min(num_rows, _GATE_ROWS), gate.num_outputs, gate)


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return how many tiles a step can have: an expert's last one may hold a single pair."""
    return min(num_pairs, num_experts + num_pairs // tile_rows)
