"""Pools in slabs, and chunks as ranges of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv.kv_layout import Layer
from kv_transfer.lanes.rdma.slabs import (
    MAX_REGIONS,
    MAX_SLABS,
    PlacedPool,
    SlabbedPool,
    ranges_of,
    slabbed,
)
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.pool_shape import PoolShape
from tests.support.kv.pool_shapes import kv_shape

PIECE = 8
NUM_LAYERS = 3


@pytest.mark.covers("F21")
@pytest.mark.parametrize(
    ("num_layers", "num_blocks", "num_slabs", "blocks_per_slab"),
    [
        (3, 12, 12, 1),
        (3, 100, 15, 7),
        (30, 1600, 16, 100),
        (36, 1000, 14, 72),
        (700, 1000, 1, 1000),
        (1, 1, 1, 1),
    ],
)
def test_as_many_slabs_as_the_bounds_allow(
    num_layers: int, num_blocks: int, num_slabs: int, blocks_per_slab: int
) -> None:
    pool = slabbed(kv_shape(num_layers, num_blocks, PIECE))
    assert (pool.num_slabs, pool.blocks_per_slab) == (num_slabs, blocks_per_slab)
    assert pool.num_slabs <= MAX_SLABS
    assert pool.num_slabs == 1 or 2 * num_layers * pool.num_slabs <= MAX_REGIONS


def test_the_regions_of_layers_that_differ_are_the_pool_too() -> None:
    pool = slabbed(UNEQUAL, max_slabs=5)
    regions = sorted(region for slab in range(pool.num_slabs) for region in pool.regions(slab))
    assert len(regions) == pool.num_slabs * 5
    ends = [offset + length for offset, length in regions]
    assert [offset for offset, _ in regions] == [0, *ends[:-1]]
    assert ends[-1] == UNEQUAL.num_bytes == 12 * (2 * 8 + 24 + 2 * 48)


@pytest.mark.covers("F21")
@pytest.mark.parametrize("num_blocks", [1, 7, 12])
def test_the_regions_of_all_slabs_are_the_pool(num_blocks: int) -> None:
    pool = slabbed(kv_shape(NUM_LAYERS, num_blocks, PIECE), max_slabs=3)
    regions = sorted(region for slab in range(pool.num_slabs) for region in pool.regions(slab))
    assert regions[0][0] == 0
    ends = [offset + length for offset, length in regions]
    assert [offset for offset, _ in regions[1:]] == ends[:-1]
    assert ends[-1] == NUM_LAYERS * 2 * num_blocks * PIECE


def test_neighbours_in_both_pools_and_one_slab_of_each_are_one_range() -> None:
    source = PlacedPool(SlabbedPool(kv_shape(NUM_LAYERS, 12, PIECE), 12), (0,))
    target = PlacedPool(SlabbedPool(kv_shape(NUM_LAYERS, 8, PIECE), 4), (10_000, 20_000))
    chunk = LayerChunk(1, as_blocks(range(5)), as_blocks([3, 4, 5, 7, 8]))
    keys_at, values_at = 2 * 12 * PIECE, 3 * 12 * PIECE
    keys_to, values_to = 2 * 8 * PIECE, 3 * 8 * PIECE
    ranges = ranges_of(chunk, as_blocks([2, 3, 4, 5, 6]), source, target)
    assert [tuple(one) for one in ranges.tolist()] == [
        (keys_at + 3 * PIECE, 10_000 + keys_to + 2 * PIECE, 2 * PIECE),
        (values_at + 3 * PIECE, 10_000 + values_to + 2 * PIECE, 2 * PIECE),
        (keys_at + 5 * PIECE, 20_000 + keys_to + 4 * PIECE, PIECE),
        (values_at + 5 * PIECE, 20_000 + values_to + 4 * PIECE, PIECE),
        (keys_at + 7 * PIECE, 20_000 + keys_to + 5 * PIECE, 2 * PIECE),
        (values_at + 7 * PIECE, 20_000 + values_to + 5 * PIECE, 2 * PIECE),
    ]


blocks_of_both = st.integers(1, 8).flatmap(
    lambda count: st.tuples(
        *[st.lists(st.integers(0, 11), min_size=count, max_size=count, unique=True)] * 2
    )
)


UNEQUAL = PoolShape((Layer(2, 1, 8), Layer(1, 1, 24), Layer(2, 3, 16)), 12)


@given(
    st.sampled_from([kv_shape(NUM_LAYERS, 12, PIECE), UNEQUAL]),
    blocks_of_both,
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, NUM_LAYERS - 1),
)
def test_ranges_bring_each_block_to_its_target_within_one_region(
    shape: PoolShape,
    blocks: tuple[list[int], list[int]],
    source_slab: int,
    target_slab: int,
    layer: int,
) -> None:
    sources, targets = sorted(blocks[0]), blocks[1]
    pools = [SlabbedPool(shape, size) for size in (source_slab, target_slab)]
    piece_bytes = shape.layers[layer].piece_bytes
    # Far apart, so that an address tells which slab it was meant for.
    source, target = (
        PlacedPool(pool, tuple(100_000 * (slab + 1) for slab in range(pool.num_slabs)))
        for pool in pools
    )
    chunk = LayerChunk(layer, as_blocks(range(len(sources))), as_blocks(sources))
    written = {}
    for here, there, num_bytes in ranges_of(chunk, as_blocks(targets), source, target).tolist():
        assert _is_in_one_region(source, here, num_bytes)
        assert _is_in_one_region(target, there, num_bytes)
        for offset in range(0, num_bytes, piece_bytes):
            written[there + offset] = here + offset
    assert written == {
        _address(target, layer, kind, targets[i]): _address(source, layer, kind, sources[i])
        for i in range(len(sources))
        for kind in range(shape.layers[layer].num_planes)
    }


def _address(place: PlacedPool, layer: int, kind: int, block: int) -> int:
    start = place.starts[block // place.pool.blocks_per_slab]
    return start + place.pool.shape.offset(layer, kind, block)


def _is_in_one_region(place: PlacedPool, address: int, num_bytes: int) -> bool:
    return any(
        place.starts[slab] + offset <= address
        and address + num_bytes <= place.starts[slab] + offset + length
        for slab in range(place.pool.num_slabs)
        for offset, length in place.pool.regions(slab)
    )
