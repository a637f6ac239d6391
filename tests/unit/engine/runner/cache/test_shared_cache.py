"""A KV cache in memory that another process reads: what is computed is there at once."""

from __future__ import annotations

import numpy as np
import pytest

from common.kv.kv_layout import KVLayout
from engine.runner.cache.kv_cache import KVCache
from engine.runner.paddle_import import paddle
from kv_transfer.lanes.shm.shared_pool import SharedPool, map_pool

NUM_BLOCKS = 6


def layout(dtype: str) -> KVLayout:
    return KVLayout(
        model_digest="any", num_layers=3, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype
    )


def shared_cache(dtype: str, *, is_mirrored: bool) -> tuple[KVCache, SharedPool, list[bool]]:
    """The cache, its memory, and whether that was taken at once."""
    pools: list[SharedPool] = []
    touched: list[bool] = []

    def allocate(num_bytes: int, is_touched: bool) -> np.ndarray:
        pools.append(SharedPool(num_bytes, is_touched=is_touched))
        touched.append(is_touched)
        return pools[-1].memory

    memory_bytes = NUM_BLOCKS * layout(dtype).block_bytes + 1
    cache = KVCache(layout(dtype), memory_bytes, is_mirrored=is_mirrored, host_memory=allocate)
    return cache, pools[0], touched


@pytest.mark.parametrize("is_mirrored", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_reader_sees_what_was_computed(dtype: str, is_mirrored: bool) -> None:
    if not is_mirrored and dtype == "bfloat16":
        pytest.skip("numpy cannot look at bfloat16, and no CPU cache has it")
    cache, pool, touched = shared_cache(dtype, is_mirrored=is_mirrored)
    assert touched == [not is_mirrored]
    shared = map_pool(pool.offer(NUM_BLOCKS), cache.layout).memory.bytes()
    seen = shared.reshape(cache.layout.pool_shape(NUM_BLOCKS))
    assert not seen.any()
    values = np.random.default_rng(1).standard_normal([2, 4, 16]).astype(np.float32)
    written = paddle.to_tensor(values).astype(dtype)
    for layer in range(3):
        for kind in (0, 1):
            cache.layer(layer)[kind][4] = written
    assert cache.begin_copy([4], cache.host_bytes, [4], is_out=True).is_done()
    wanted = written.view("uint8").numpy().reshape(-1)
    for layer in range(3):
        for kind in (0, 1):
            assert np.array_equal(seen[layer, kind, 4], wanted)
    assert not seen[:, :, [0, 1, 2, 3, 5]].any()
    assert np.array_equal(seen, cache.host_bytes)
    cache.host_bytes[2, 1, 0] = wanted
    assert cache.begin_copy([0], cache.host_bytes, [0], is_out=False).is_done()
    assert np.array_equal(cache.layer(2)[1][0].astype("float32").numpy(), written.astype("float32"))


def test_without_such_memory_it_has_its_own() -> None:
    wanted = layout("float32")
    cache = KVCache(wanted, NUM_BLOCKS * wanted.block_bytes, host_memory=lambda *_: None)
    assert cache.host_bytes.shape == (3, 2, NUM_BLOCKS, wanted.piece_bytes)
    assert cache.host_bytes.flags.writeable
