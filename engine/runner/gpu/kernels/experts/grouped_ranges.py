"""Products of the experts' quantised weights, with the inputs in ranges, as in `ranged_products`.

A tile's pairs and an expert's weights are found as in `grouped_products`; sums are those of a
product of one matrix, also in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.experts.grouped_products import (
    pairs_of,
    store_activated,
    tile_and_outputs,
)
from engine.runner.gpu.kernels.ordering import begin
from engine.runner.gpu.kernels.products import sources_of, store_sum, with_bias
from engine.runner.gpu.kernels.ranged_products import in_turn, together


@triton.jit
def grouped_ranges(x, weights, scales, y, tiles, num_tiles, pairs, biases, N: tl.constexpr,
                   K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHOSEN: tl.constexpr,
                   RANGES: tl.constexpr, UNROLLED: tl.constexpr, FORM: tl.constexpr,
                   IS_GATED: tl.constexpr, STEEPNESS: tl.constexpr, LIMIT: tl.constexpr,
                   IS_TOGETHER: tl.constexpr, HAS_PTX: tl.constexpr,
                   IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute `grouped_gate_up` when IS_GATED, and otherwise `grouped_product`.

    `weights` are [experts, 2 N or N, words] and `scales` those of all outputs, in order. A range is
    computed by a warp or two of its own when IS_TOGETHER, and otherwise one after the other.
    """
    begin(IS_PROGRAMMATIC)
    tile, outputs = tile_and_outputs(tl.program_id(0), N, BN)
    if tile < tl.load(num_tiles):
        expert, places, is_pair, pair = pairs_of(tiles, pairs, tile, BM)
        WIDTH: tl.constexpr = 2 * N if IS_GATED else N
        sources = expert.to(tl.int64) * WIDTH + sources_of(outputs, N, BN)
        row = pair // CHOSEN if IS_GATED else places
        x_rows = x + row.to(tl.int64) * K
        if IS_TOGETHER:
            total, above = together(
                x_rows[None, :, None], weights, scales, is_pair[None, :, None], sources, N, K, BM,
                BN, RANGES, UNROLLED, FORM, IS_GATED, HAS_PTX,
            )  # fmt: skip
        else:
            total = in_turn(
                x_rows[:, None], weights, scales, is_pair[:, None], sources, K, BM, BN, RANGES,
                UNROLLED, FORM, HAS_PTX,
            )  # fmt: skip
            above = total
            if IS_GATED:
                above = in_turn(
                    x_rows[:, None], weights, scales, is_pair[:, None], sources + N, K, BM, BN,
                    RANGES, UNROLLED, FORM, HAS_PTX,
                )  # fmt: skip
        if IS_GATED:
            store_activated(
                y, total, above, biases, sources, places, is_pair, outputs, N, BN, STEEPNESS, LIMIT
            )
        else:
            total = with_bias(total, biases, sources)
            store_sum(y, y, total, pair, is_pair, outputs, N, BN, False)
