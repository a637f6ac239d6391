"""Blocks that were swapped out return unchanged, to any block ids."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError, InternalError
from common.kv.kv_layout import KVLayout
from common.settings.config import EngineConfig, ModelConfig
from engine.core.step.step_batch import batch_of
from engine.runner.cache.host_pool import HostBlockArrays
from engine.runner.cache.kv_cache import KVCache
from engine.runner.start.load import load_model_runner
from tests.support.models.mtp_running import chunk, ids, load_with_mtp, only, step, write_inside
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

NUM_BLOCKS, NUM_HOST_BLOCKS = 9, 5


def _pool(*, is_mirrored: bool) -> tuple[KVCache, HostBlockArrays]:
    layout = KVLayout(
        model_digest="", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32"
    )
    cache = KVCache(layout, NUM_BLOCKS * layout.block_bytes, is_mirrored=is_mirrored)
    pool = HostBlockArrays(cache, NUM_HOST_BLOCKS * layout.block_bytes + layout.block_bytes - 1)
    assert pool.num_blocks == NUM_HOST_BLOCKS
    return cache, pool


def swap(
    pool: HostBlockArrays, ours: list[int], theirs: list[int], *, is_out: bool, is_late: bool
) -> None:
    if is_late:
        assert pool.begin_swap(ours, theirs, is_out=is_out).is_done()
    elif is_out:
        pool.swap_out(ours, theirs)
    else:
        pool.swap_in(theirs, ours)


@pytest.mark.covers("F124")
@pytest.mark.parametrize("is_mirrored", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_round_trip_over_any_blocks(is_mirrored: bool, seed: int) -> None:
    cache, pool = _pool(is_mirrored=is_mirrored)
    choose = random.Random(seed)
    content = cache.slots().view(np.float32)
    content[:] = np.random.RandomState(seed).standard_normal(content.shape)
    count = choose.randint(1, NUM_HOST_BLOCKS)
    # Sorted on one side half of the time: runs on one side only must not be taken for runs.
    out, host, back = (choose.sample(range(n), count) for n in (NUM_BLOCKS, NUM_HOST_BLOCKS, 9))
    if seed % 2:
        out, host = sorted(out), sorted(host)
    saved, before = content[:, :, out].copy(), content.copy()
    swap(pool, out, host, is_out=True, is_late=is_mirrored)
    np.testing.assert_array_equal(content, before)
    content[:, :, out] = -1
    order = choose.sample(range(count), count)
    wanted = content.copy()
    theirs, ours = [host[i] for i in order], [back[i] for i in order]
    swap(pool, ours, theirs, is_out=False, is_late=is_mirrored)
    for i in order:
        wanted[:, :, back[i]] = saved[:, :, i]
    np.testing.assert_array_equal(content, wanted)


@pytest.mark.covers("F128")
def test_blocks_behind_four_gibibytes_of_host_memory_return() -> None:
    layout = KVLayout(
        model_digest="", num_layers=1, num_kv_heads=1, head_dim=64, block_size=1024, dtype="float32"
    )
    cache = KVCache(layout, 3 * layout.block_bytes, is_mirrored=False)
    try:
        pool = HostBlockArrays(cache, 5 << 30)  # only what is written takes memory
    except MemoryError:
        pytest.skip("this machine does not promise 5 GiB")
    cache.host_bytes[:, :, 0] = 1
    cache.host_bytes[:, :, 1] = 2
    last = pool.num_blocks - 1
    pool.swap_out([0, 1], [0, last])
    cache.host_bytes[:] = 0
    pool.swap_in([last, 0], [0, 1])
    assert (cache.host_bytes[:, :, 0] == 2).all()
    assert (cache.host_bytes[:, :, 1] == 1).all()


def test_bad_ids_move_nothing() -> None:
    cache, pool = _pool(is_mirrored=False)
    content = cache.slots().view(np.float32)
    content[:] = 1
    for method, first, second, words in (
        (pool.swap_out, [1, 2], [0], "swapping 2 blocks and 1 host blocks"),
        (pool.swap_out, [NUM_BLOCKS], [0], "block id 9: wanted 0 to 8"),
        (pool.swap_out, [-1], [0], "block id -1"),
        (pool.swap_in, [5], [0], "host block id 5: wanted 0 to 4"),
        (pool.swap_in, [0, -1], [0, 1], "host block id -1"),
        (partial(pool.begin_swap, is_out=True), [9], [0], "block id 9"),
        (partial(pool.begin_swap, is_out=False), [0], [5], "host block id 5"),
    ):
        with pytest.raises(InternalError, match=words):
            method(first, second)
    assert (content == 1).all()


def test_a_runner_without_swap_space_has_no_host_blocks(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["llama"])
    config = ModelConfig(model=str(folder)), EngineConfig(block_size=16, kv_cache_memory=2 << 20)
    assert load_model_runner(*config).num_host_blocks == 0
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    runner = load_model_runner(*config, host_space=3 * block_bytes + 1)
    assert runner.num_host_blocks == 3
    runner.swap_out([], [])
    runner.swap_in([], [])
    wrong = f"are {block_bytes - 1} bytes together: wanted at least {block_bytes}"
    with pytest.raises(ConfigError, match=wrong):
        load_model_runner(*config, host_space=block_bytes - 1)


def test_a_sequence_goes_on_after_it_was_away(tmp_path: Path) -> None:
    """At other blocks of the cache, and with the drafting layer's keys and values too."""
    prompt = prompt_of(40)
    runner = load_with_mtp(write_inside(tmp_path, "deepseek"), host_space=1 << 20)
    runner.execute(batch_of([chunk(prompt, 0, 39, [4, 5, 2])]))
    runner.swap_out([4, 5, 2], [1, 0, 7])
    wanted = only(runner.execute(batch_of([step(prompt, 39, [4, 5, 2], num_proposals=3)])))
    runner.kv_bytes.fill(0xFF)
    runner.swap_in([1, 0, 7], [9, 3, 8])
    found = only(runner.execute(batch_of([step(prompt, 39, [9, 3, 8], num_proposals=3)])))
    assert found == wanted
    assert len(ids(found)) == 1
