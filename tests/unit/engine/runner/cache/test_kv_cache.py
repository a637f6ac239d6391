"""A cache on a device of its own, played on a CPU: blocks travel by way of the host's mirror."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from common.kv.kv_layout import KVLayout
from engine.runner.cache.kv_cache import KVCache
from engine.runner.paddle_import import paddle

NUM_BLOCKS = 6


def new_cache(dtype: str, *, is_mirrored: bool) -> KVCache:
    layout = KVLayout(
        model_digest="any", num_layers=3, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype
    )
    return KVCache(layout, NUM_BLOCKS * layout.block_bytes, is_mirrored=is_mirrored)


def stage(cache: KVCache, block_ids: Sequence[int], *, is_out: bool) -> None:
    assert cache.begin_copy(block_ids, cache.host_bytes, block_ids, is_out=is_out).is_done()


def filled(cache: KVCache, seed: int) -> np.ndarray:
    """Write values into every layer through its views, as attention does; returns them all."""
    rng = np.random.default_rng(seed)
    values = (40 * rng.standard_normal(cache.tensor.shape)).astype(np.float32)
    every = paddle.to_tensor(list(range(NUM_BLOCKS)))
    for index in range(cache.layout.num_layers):
        for part, target in enumerate(cache.layer(index)):
            target[every] = paddle.to_tensor(values[index, part]).astype(cache.layout.dtype)
    return everything(cache)


def everything(cache: KVCache) -> np.ndarray:
    return np.asarray(cache.tensor.astype("float32").numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_staged_blocks_arrive_and_others_stay(dtype: str) -> None:
    source, target = new_cache(dtype, is_mirrored=True), new_cache(dtype, is_mirrored=True)
    sent, before = filled(source, 1), filled(target, 2)
    stage(source, [4, 1], is_out=True)
    target.host_bytes[:, :, [0, 5]] = source.host_bytes[:, :, [4, 1]]
    stage(target, [0, 5], is_out=False)
    after = everything(target)
    np.testing.assert_array_equal(after[:, :, [0, 5]], sent[:, :, [4, 1]])
    np.testing.assert_array_equal(after[:, :, 1:5], before[:, :, 1:5])


def test_a_mirror_holds_nothing_that_was_not_staged() -> None:
    cache = new_cache("float32", is_mirrored=True)
    filled(cache, 1)
    stage(cache, [2], is_out=True)
    assert not cache.host_bytes[:, :, [0, 1, 3, 4, 5]].any()


def test_on_a_cpu_the_bytes_are_the_cache_and_need_no_staging() -> None:
    mirrored, direct = (new_cache("float32", is_mirrored=flag) for flag in (True, False))
    np.testing.assert_array_equal(filled(mirrored, 1), filled(direct, 1))
    stage(mirrored, range(NUM_BLOCKS), is_out=True)
    np.testing.assert_array_equal(mirrored.host_bytes, direct.host_bytes)
