"""The tile of a product, by its shape and its number of rows, and that of attention of chunks.

Tiles change the time and never the bits: each output is one chain over K in every tile, or chains
of quantised weights' groups in ranges, whose number depends on their form and shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.errors import ConfigError
from engine.runner.gpu.cuda_driver import DeviceProperties
from engine.runner.gpu.weights import STRIP_INPUTS, Form, Matrix

_WORD_BITS = 16
_LINE_WORDS = 64
"""Words of a line of the L2 cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` x `outputs` results a program, read `depth` columns at a time, `stages` in flight."""

    rows: int
    outputs: int
    depth: int
    num_warps: int
    stages: int
    prefetch: int = 0
    """Columns of its weights, of each range, that a program prefetches during its predecessor."""
    is_described: bool = False
    """Whether tiles are read by the copy engine."""
    is_together: bool = False
    """Whether a program's warps have a range of inputs each; for quantised weights only."""

    def programs(self, num_rows: int, num_outputs: int) -> int:
        """Return how many programs cover the result."""
        return -(-num_rows // self.rows) * -(-num_outputs // self.outputs)

    def words_ahead(self, form: Form) -> int:
        """Return how many words of an output's weights are prefetched: whole lines, or none."""
        words = self.prefetch * form.bits // _WORD_BITS
        return words if words >= _LINE_WORDS else 0


_WIDE_OUTPUTS = 8192
"""Least outputs whose tiles of 64 are enough programs for a card, at any number of rows."""

_MANY_ROWS = 1024
_READS_SHARED_MEMORY = range(90, 110)
"""Compute capabilities whose matrix instructions read operands from shared memory, `wgmma` and
`tcgen05`; all others have `mma.sync` alone, those of 12.0 too."""
_MOST_RESULTS_A_WARP = 2048
_MOST_RANGED_A_WARP = 512
_MOST_STAGES_IN_REGISTERS = 4
_CHUNK_NUMBERS = 128 * 128
"""Numbers of a chunk's tile of queries, at most: with more of them registers would spill."""
_OTHER_SHARED = 4096
"""Bytes of shared memory beside the tiles, at most."""
_RANGES = {16: 1, 8: 4, 4: 8}
"""Ranges by bits of a weight: the fewer there are, the more chains keep memory busy."""
_MOST_ROWS_TOGETHER = 32
_TOGETHER = {
    (8, 8): ((16, 256, 3), (16, 128, 6), (16, 256, 3)),
    (8, 16): ((16, 128, 3), (16, 256, 3), (16, 128, 3)),
    (8, 32): ((32, 128, 3), (16, 128, 3)),
    (4, 8): ((32, 128, 3), (32, 256, 3), (32, 128, 3)),
    (4, 16): ((32, 128, 3), (32, 256, 3), (32, 128, 3)),
    (4, 32): ((32, 128, 3), (32, 128, 3)),
}
"""Outputs, depth and stages by bits of a weight and rows: of products with more outputs than
inputs, with others, and of gate and up."""
_LEAST_DEPTH = 16
"""Inputs that one matrix instruction multiplies."""


def product_tile(num_rows: int, num_outputs: int, weights: Matrix) -> Tile:
    """Return the tile of a product with `num_outputs` results a row.

    The tiles are those that were fastest on an H100 with the shapes of an 8B model (the stage
    `sweep` of `tests.gpu.on_card` looks for them).
    """
    return fitted(_product_tile(num_rows, num_outputs, weights), weights)


def _product_tile(num_rows: int, num_outputs: int, weights: Matrix) -> Tile:
    if weights.form is not Form.BF16:
        return ranged_tile(num_rows, weights)
    is_wide = num_outputs >= _WIDE_OUTPUTS
    if num_rows <= 16:
        if weights.num_inputs % 128:
            # Not measured: with few inputs at a time, more outputs keep as much under way.
            return Tile(16, 32, 64, 4, 6, prefetch=512)
        if num_outputs > weights.num_inputs:
            return Tile(16, 16, 512, 4, 3, prefetch=512)
        return Tile(16, 16, 256, 4, 6, prefetch=512)
    if num_rows <= 32:
        if is_wide:
            return Tile(32, 128, 128, 4, 3, 256, is_described=True)
        return Tile(32, 64, 128, 4, 6, 256, is_described=True)
    if num_rows <= 64:
        return Tile(64, 64, 128, 4, 4 if is_wide else 6, 256, is_described=True)
    if num_rows <= 256:
        if is_wide:
            return Tile(128, 128, 128, 4, 3, 256, is_described=True)
        if num_outputs > weights.num_inputs:
            return Tile(128, 64, 128, 4, 4, 256, is_described=True)
        return Tile(64, 64, 128, 4, 6, 256, is_described=True)
    if num_rows <= _MANY_ROWS:
        return Tile(128, 128, 64, 8, 4, is_described=True)
    if num_outputs > weights.num_inputs:
        return Tile(256, 128, 64, 8, 3, is_described=True)
    return Tile(128, 256, 64, 8, 4, is_described=True)


def gate_up_tile(num_rows: int, num_outputs: int, weights: Matrix) -> Tile:
    """Return the tile of the gate's and the up projection's product."""
    return fitted(_gate_up_tile(num_rows, weights), weights)


def _gate_up_tile(num_rows: int, weights: Matrix) -> Tile:
    if weights.form is not Form.BF16:
        return ranged_tile(num_rows, weights, 2)
    if num_rows <= 16:
        return Tile(16, 64, 128, 4, 4, prefetch=512)
    if num_rows <= 32:
        return Tile(32, 64, 128, 4, 4, 256, is_described=True)
    if num_rows <= 64:
        return Tile(64, 64, 128, 4, 4, 256, is_described=True)
    if num_rows <= 256:
        return Tile(128, 64, 128, 4, 3, 256, is_described=True)
    return Tile(128, 128, 64, 8, 3, is_described=True)


def num_ranges(weights: Matrix) -> int:
    """Return the number of ranges into which a product of quantised weights divides its inputs.

    It enters the bits, so it depends on the weights alone. A range is a number of whole strips;
    where the last strip is not whole, the last range is shorter, and not empty.
    """
    ranges, strips = _RANGES[weights.form.bits], weights.num_strips
    if weights.num_inputs % STRIP_INPUTS == 0:
        while strips % ranges:
            ranges //= 2
    while (ranges - 1) * -(-strips // ranges) >= strips:
        ranges //= 2
    return ranges


def _range_strips(weights: Matrix) -> tuple[int, int]:
    """Return the strips of a range, and those of the last one."""
    ranges = num_ranges(weights)
    each = -(-weights.num_strips // ranges)
    return each, weights.num_strips - (ranges - 1) * each


def ranged_tile(num_rows: int, weights: Matrix, width: int = 1) -> Tile:
    """Return the tile of quantised weights; `width` is 2 for a gate and an up sum."""
    is_deep, bits = weights.num_outputs <= weights.num_inputs, weights.form.bits
    if num_rows > 16 and width == 2:
        if num_rows <= 64:
            return Tile(32, 64, STRIP_INPUTS, 4, 6 if num_rows <= 32 and bits == 8 else 4)
        has_short_groups = weights.form.group_inputs < STRIP_INPUTS
        return Tile(64, 64, STRIP_INPUTS, 8 if has_short_groups else 4, 4)
    if num_rows > _MOST_ROWS_TOGETHER:
        if num_rows <= 64 or (bits == 8 and is_deep and num_rows <= 256):
            return Tile(32, 64, STRIP_INPUTS, 4, 6)
        return Tile(64, 64, STRIP_INPUTS, 4, 4) if bits == 8 else Tile(64, 128, STRIP_INPUTS, 8, 4)
    rows = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
    outputs, depth, stages = _TOGETHER[bits, rows][2 if width == 2 else int(is_deep)]
    warps = max(num_ranges(weights), 2)
    return Tile(rows, outputs, depth, warps, stages, 256, is_together=True)


def suited(tile: Tile, card: DeviceProperties, width: int, weights: Matrix) -> Tile:
    """Return the tile as this card can compute it; `width` is 2 for a gate and an up sum.

    Where matrix instructions keep both operands in registers, a program has fewer results, and
    its threads read the tiles. A tile takes as many stages as fit.
    """
    if card.capability not in _READS_SHARED_MEMORY:
        most = _MOST_RESULTS_A_WARP * tile.num_warps // width
        if weights.form is not Form.BF16:
            # Of three sums: a group, a range and the result.
            most = _MOST_RANGED_A_WARP * tile.num_warps // width
            # Two strips at a time would take more registers than there are.
            tile = replace(tile, depth=STRIP_INPUTS)
        while tile.rows * tile.outputs > most:
            tile = replace(tile, outputs=tile.outputs // 2)
        tile = replace(tile, is_described=False, stages=min(tile.stages, _MOST_STAGES_IN_REGISTERS))
    room = card.shared_bytes - _OTHER_SHARED
    if weights.form is Form.BF16:
        while 2 * _stage_bytes(tile, width, weights.form) > room and tile.depth > _LEAST_DEPTH:
            tile = replace(tile, depth=tile.depth // 2)
    if tile.is_together:
        # The operands are in registers, so one stage fewer is kept.
        stage_bytes = num_ranges(weights) * _stage_bytes(tile, width, weights.form)
        return replace(tile, stages=max(min(tile.stages, 1 + room // stage_bytes), 2))
    # Range after range, a program reads the gate's weights and then those of up.
    width = width if weights.form is Form.BF16 else 1
    stages = min(tile.stages, room // _stage_bytes(tile, width, weights.form))
    return replace(tile, stages=max(stages, 2))


def _stage_bytes(tile: Tile, width: int, form: Form) -> int:
    return (form.bits // 4 * width * tile.outputs + 4 * tile.rows) * tile.depth // 2


def fitted(tile: Tile, weights: Matrix) -> Tile:
    """Return the tile with a depth that divides the number of inputs, and prefetch within them.

    Raises `ConfigError` for inputs that no matrix instruction divides.
    """
    is_plain = weights.form is Form.BF16
    least = _LEAST_DEPTH if is_plain else weights.form.group_inputs
    if weights.num_inputs % least:
        raise ConfigError(
            f"a product of {weights.num_inputs} inputs with weights in {weights.form.name}: "
            f"wanted a multiple of {least}"
        )
    lengths = [weights.num_inputs]
    if not is_plain:
        lengths = [STRIP_INPUTS * strips for strips in _range_strips(weights)]
    depth, ahead = tile.depth, tile.prefetch
    while any(length % depth for length in lengths):
        depth //= 2
    while ahead > lengths[-1]:
        ahead //= 2
    return replace(tile, depth=depth, prefetch=ahead)


def chunk_rows(head_dim: int, block_size: int, shared_bytes: int, *, has_scales: bool) -> int:
    """Return the rows of a chunk's tile, with `shared_bytes` of shared memory for a program.

    Over keys of a byte each there are two halves of sums. The number of rows does not enter the
    bits, but that of keys does: a block's keys are always added together.
    """
    rows = _CHUNK_NUMBERS // (max(head_dim, 128) * (2 if has_scales else 1))
    cached_bytes = 2 * block_size * head_dim * (1 if has_scales else 2)
    while 2 * rows * (head_dim + block_size) + cached_bytes > shared_bytes - _OTHER_SHARED:
        rows //= 2  # shared memory holds queries and weights beside a block's keys and values
    return rows
