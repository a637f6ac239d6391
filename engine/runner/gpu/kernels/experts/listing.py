"""Pairs of a row and an expert, listed by expert, in tiles of `tile_rows` pairs.

    experts   7 2 7 │ 2 5 7 │ …     of each pair
    pairs     1 3 … │ 4 … │ 0 2 5 … the pairs of expert 2, of 5 and of 7, in ascending order
    tiles     (expert, first place in `pairs`, number of pairs), the experts in ascending order

A grid is made before anyone knows how many tiles there are: a program without a tile ends at once.
Counts are integers, so nothing depends on an order of programs or threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runner.gpu.kernels.ordering import begin

TILE_WORDS: tl.constexpr = tl.constexpr(4)
"""Words of a tile in the list; the last one is not used."""


@triton.jit
def _experts_of(experts, places, num_pairs, EXPERTS: tl.constexpr):
    """Return the experts of pairs, EXPERTS for numbers that no pair has."""
    return tl.load(experts + places, mask=places < num_pairs, other=EXPERTS)


@triton.jit
def list_pairs(experts, pairs, tiles, num_tiles, num_pairs, tile_rows, EXPERTS: tl.constexpr,
               LANES: tl.constexpr, SIZE: tl.constexpr,
               IS_PROGRAMMATIC: tl.constexpr):  # fmt: skip
    """List an expert's pairs and tiles, and the number of all tiles. Program: expert.

    Pairs of rows of padding, whose expert is EXPERTS, are not listed.
    """
    begin(IS_PROGRAMMATIC)
    own = tl.program_id(0)
    lane = tl.arange(0, SIZE)
    counts = tl.zeros((LANES,), tl.int32)
    for start in range(0, num_pairs, SIZE):
        found = _experts_of(experts, start + lane, num_pairs, EXPERTS)
        counts += tl.histogram(found, LANES, mask=found < EXPERTS)
    number = tl.arange(0, LANES)
    in_tiles = (counts + tile_rows - 1) // tile_rows
    first = tl.sum(tl.where(number < own, counts, 0), 0)
    first_tile = tl.sum(tl.where(number < own, in_tiles, 0), 0)
    count = tl.sum(tl.where(number == own, counts, 0), 0)
    own_tiles = (count + tile_rows - 1) // tile_rows
    for place in range(own_tiles):
        tile = tiles + (first_tile + place) * TILE_WORDS
        tl.store(tile, own)
        tl.store(tile + 1, first + place * tile_rows)
        tl.store(tile + 2, tl.minimum(count - place * tile_rows, tile_rows))
    if own == EXPERTS - 1:
        tl.store(num_tiles, first_tile + own_tiles)
    if count > 0:
        reached = first
        for start in range(0, num_pairs, SIZE):
            is_own = _experts_of(experts, start + lane, num_pairs, EXPERTS) == own
            up_to = tl.cumsum(is_own.to(tl.int32), 0)
            tl.store(pairs + reached + up_to - 1, start + lane, mask=is_own)
            reached += tl.max(up_to, 0)
