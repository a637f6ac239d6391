"""Products of the experts' weights and the rows that are sent to each: `W @ x.T`, as in `products`.

All experts' weights of a layer are one matrix [experts, outputs, inputs]. A program computes a tile
of the list that `listing` writes. A tile's pairs are any rows, so their inputs are gathered; each
output is one chain over K, as a product of one matrix is.

`biases` are float32, of all experts' outputs; None: there are none. A sum has its bias before it is
rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.experts.listing import TILE_WORDS
from engine.runner.gpu.kernels.ordering import begin
from engine.runner.gpu.kernels.products import (
    sources_of,
    store_gated,
    store_sum,
    with_bias,
)


@triton.jit
def tile_and_outputs(program, N: tl.constexpr, BN: tl.constexpr):
    """Return the program's tile of pairs and its outputs [BN]: an expert's programs are near."""
    TILES_N: tl.constexpr = (N + BN - 1) // BN
    return program // TILES_N, program % TILES_N * BN + tl.arange(0, BN)


@triton.jit
def pairs_of(tiles, pairs, tile, BM: tl.constexpr):
    """Return a tile's expert, its places in `pairs`, which of them there are, and their pairs."""
    at = tiles + tile * TILE_WORDS
    place = tl.arange(0, BM)
    is_pair = place < tl.load(at + 2)
    places = tl.load(at + 1) + place
    return tl.load(at), places, is_pair, tl.load(pairs + places, mask=is_pair, other=0)


@triton.jit
def store_activated(y, gate, up, biases, sources, rows, is_row, outputs, N: tl.constexpr,
                    BN: tl.constexpr, STEEPNESS: tl.constexpr, LIMIT: tl.constexpr):  # fmt: skip
    """Store what an expert computes of its sums [BN, BM] of gate and up.

    `sources` are the outputs' places in `biases`, of the gate. STEEPNESS None: silu(gate) * up.
    Otherwise gate and up are rounded and then kept within LIMIT, NaN among them, and the result is
    rounded once (`ClampedSwish`).
    """
    gate = with_bias(gate, biases, sources)
    up = with_bias(up, biases, sources + N)
    if STEEPNESS is None:
        store_gated(y, gate, up, rows, is_row, outputs, N, BN, False)
    else:
        kind = y.dtype.element_ty
        gate = gate.to(kind).to(tl.float32)
        up = up.to(kind).to(tl.float32)
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
        swish = gate / (1.0 + tl.exp(-STEEPNESS * gate))
        store_sum(y, y, (up + 1.0) * swish, rows, is_row, outputs, N, BN, False)


@triton.jit
def grouped_gate_up(x, weights, y, tiles, num_tiles, pairs, biases, N: tl.constexpr,
                    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                    CHOSEN: tl.constexpr, STEEPNESS: tl.constexpr, LIMIT: tl.constexpr,
                    IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute y[place, N], what gate and up become of the row of the pair at each place.

    `weights` are [experts, 2 N, K] and `biases` [experts, 2 N], an expert's rows of gate first.
    """
    begin(IS_PROGRAMMATIC)
    tile, outputs = tile_and_outputs(tl.program_id(0), N, BN)
    if tile < tl.load(num_tiles):
        expert, places, is_pair, pair = pairs_of(tiles, pairs, tile, BM)
        sources = sources_of(outputs, N, BN).to(tl.int64)
        x_rows = x + (pair // CHOSEN)[:, None].to(tl.int64) * K
        own = expert.to(tl.int64) * (2 * N) + sources
        gates = weights + own[:, None] * K
        ups = gates + N * K
        gate = tl.zeros((BN, BM), tl.float32)
        up = tl.zeros((BN, BM), tl.float32)
        k = tl.arange(0, BK)[None, :]
        for start in range(0, K, BK):
            inputs = tl.trans(tl.load(x_rows + start + k, mask=is_pair[:, None], other=0.0))
            gate = tl.dot(tl.load(gates + start + k), inputs, gate)
            up = tl.dot(tl.load(ups + start + k), inputs, up)
        store_activated(y, gate, up, biases, own, places, is_pair, outputs, N, BN, STEEPNESS, LIMIT)


@triton.jit
def grouped_product(x, weights, y, tiles, num_tiles, pairs, biases, N: tl.constexpr,
                    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                    IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """Compute y[pair, N] = x[place, K] @ weights[expert, N, K].T in y's type."""
    begin(IS_PROGRAMMATIC)
    tile, outputs = tile_and_outputs(tl.program_id(0), N, BN)
    if tile < tl.load(num_tiles):
        expert, places, is_pair, pair = pairs_of(tiles, pairs, tile, BM)
        sources = sources_of(outputs, N, BN).to(tl.int64)
        x_rows = x + places[:, None].to(tl.int64) * K
        own = expert.to(tl.int64) * N + sources
        downs = weights + own[:, None] * K
        total = tl.zeros((BN, BM), tl.float32)
        k = tl.arange(0, BK)[None, :]
        for start in range(0, K, BK):
            inputs = tl.load(x_rows + start + k, mask=is_pair[:, None], other=0.0)
            total = tl.dot(tl.load(downs + start + k), tl.trans(inputs), total)
        total = with_bias(total, biases, own)
        store_sum(y, y, total, pair, is_pair, outputs, N, BN, False)
