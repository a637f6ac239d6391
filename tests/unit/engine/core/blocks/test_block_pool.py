"""Ownership of blocks: counts, eviction order, and every misuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.core.blocks.block_pool import BlockCounts, BlockPool, BlockUse


def counts(pool: BlockPool) -> tuple[int, int, int, int, int, int]:
    pool.check()
    now = pool.counts()
    return (now.free, now.cached, now.running, now.reserved, now.receiving, now.quarantined)


def cached_pool(num_blocks: int, hashes: list[bytes]) -> tuple[BlockPool, list[int]]:
    """A pool with one cached block for each hash, released in the order of `hashes`."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(len(hashes), BlockUse.RUNNING)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    for block in blocks:
        pool.release([block])
    return pool, blocks


def test_the_counts_follow_a_block_through_its_life() -> None:
    pool = BlockPool(6)
    assert counts(pool) == (6, 0, 0, 0, 0, 0)
    targets = pool.allocate(2, BlockUse.RECEIVING)
    spare = pool.allocate(1, BlockUse.RESERVED)
    assert counts(pool) == (3, 0, 0, 1, 2, 0)
    pool.start_running([*targets, *spare])
    assert counts(pool) == (3, 0, 3, 0, 0, 0)
    pool.publish(targets[0], b"first")
    pool.release([*targets, *spare])
    assert counts(pool) == (5, 1, 0, 0, 0, 0)
    assert pool.num_available == pool.counts().available == 6
    pool.acquire_cached([targets[0]])
    assert counts(pool) == (5, 0, 1, 0, 0, 0)
    assert pool.num_available == 5


def test_counts_are_available_when_free_or_cached() -> None:
    now = BlockCounts(free=2, cached=3, running=4, reserved=5, receiving=6, quarantined=7)
    assert now.available == 5


def test_a_receiving_block_comes_back_by_way_of_quarantine_alone() -> None:
    pool = BlockPool(6)
    shared = pool.allocate(1, BlockUse.RUNNING)
    targets = pool.allocate(2, BlockUse.RECEIVING)
    spare = pool.allocate(1, BlockUse.RESERVED)
    with pytest.raises(ValueError, match=f"block {targets[0]} is released but another node"):
        pool.release(targets[:1])
    assert counts(pool) == (2, 0, 1, 1, 2, 0)
    assert pool.quarantine([*shared, *targets, *spare]) == targets
    assert counts(pool) == (2, 0, 1, 1, 0, 2)
    assert pool.quarantine(targets) == []
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.acquire_cached(targets)
    with pytest.raises(ValueError, match="cannot be published"):
        pool.publish(targets[0], b"h")
    pool.release([*shared, *spare])
    assert not set(pool.allocate(4, BlockUse.RUNNING)) & set(targets)
    with pytest.raises(ValueError, match="0 are available"):
        pool.allocate(1, BlockUse.RUNNING)
    pool.release(targets)
    assert counts(pool) == (2, 0, 4, 0, 0, 0)
    with pytest.raises(ValueError, match="has no owner"):
        pool.release(targets[:1])


def test_free_blocks_are_taken_before_cached_ones_are_evicted() -> None:
    pool, (kept,) = cached_pool(3, [b"kept"])
    assert kept not in pool.allocate(2, BlockUse.RUNNING)
    assert pool.prefix_cache.match([b"kept"]) == [kept]
    assert pool.allocate(1, BlockUse.RUNNING) == [kept]
    assert pool.prefix_cache.match([b"kept"]) == []
    assert counts(pool) == (0, 0, 3, 0, 0, 0)


def test_the_least_recently_released_block_is_evicted_first() -> None:
    pool, (a, b, c) = cached_pool(3, [b"a", b"b", b"c"])
    pool.acquire_cached([a])
    pool.release([a])
    assert pool.allocate(3, BlockUse.RUNNING) == [b, c, a]


def test_within_one_release_a_prefix_outlives_what_continues_it() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3, BlockUse.RUNNING)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks)
    assert pool.allocate(3, BlockUse.RUNNING) == blocks[::-1]


def test_a_shared_block_stays_until_the_last_reference_is_dropped() -> None:
    pool, (shared,) = cached_pool(2, [b"s"])
    assert pool.is_evictable(shared)
    pool.acquire_cached([shared])
    assert not pool.is_evictable(shared)
    pool.acquire_cached([shared])
    assert not pool.is_unshared(shared)
    pool.release([shared])
    assert pool.is_unshared(shared)
    assert counts(pool) == (1, 0, 1, 0, 0, 0)
    pool.release([shared])
    assert not pool.is_unshared(shared), "nobody has it"
    assert counts(pool) == (1, 1, 0, 0, 0, 0)


def test_a_twin_of_a_published_block_is_freed_not_cached() -> None:
    pool = BlockPool(2)
    first, twin = pool.allocate(2, BlockUse.RUNNING)
    pool.publish(first, b"same")
    pool.publish(twin, b"same")
    pool.release([first, twin])
    assert counts(pool) == (1, 1, 0, 0, 0, 0)
    assert pool.prefix_cache.match([b"same"]) == [first]


def test_nothing_can_be_asked_for_or_released_in_vain() -> None:
    pool = BlockPool(2)
    assert pool.allocate(0, BlockUse.RUNNING) == []
    pool.release([])
    assert counts(pool) == (2, 0, 0, 0, 0, 0)


def take_too_many(pool: BlockPool) -> None:
    pool.allocate(pool.num_available + 1, BlockUse.RUNNING)


def release_what_is_free(pool: BlockPool) -> None:
    pool.release([0])


def release_twice(pool: BlockPool) -> None:
    (block,) = pool.allocate(1, BlockUse.RUNNING)
    pool.release([block, block])


def share_a_free_block(pool: BlockPool) -> None:
    pool.acquire_cached([0])


def share_a_receiving_block(pool: BlockPool) -> None:
    pool.acquire_cached(pool.allocate(1, BlockUse.RECEIVING))


def share_a_reserved_block(pool: BlockPool) -> None:
    pool.acquire_cached(pool.allocate(1, BlockUse.RESERVED))


def publish_a_free_block(pool: BlockPool) -> None:
    pool.publish(0, b"h")


def publish_a_free_block_with_others(pool: BlockPool) -> None:
    pool.publish_all([*pool.allocate(1, BlockUse.RUNNING), 2], [b"g", b"h"])


def publish_a_receiving_block(pool: BlockPool) -> None:
    pool.publish(pool.allocate(1, BlockUse.RECEIVING)[0], b"h")


def publish_a_reserved_block(pool: BlockPool) -> None:
    pool.publish(pool.allocate(1, BlockUse.RESERVED)[0], b"h")


def run_on_a_free_block(pool: BlockPool) -> None:
    pool.start_running([0])


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (take_too_many, "asked for 4 blocks, 3 are available"),
        (release_what_is_free, "has no owner"),
        (release_twice, "has no owner"),
        (share_a_free_block, "no finished KV"),
        (share_a_receiving_block, "no finished KV"),
        (share_a_reserved_block, "no finished KV"),
        (publish_a_free_block, "cannot be published"),
        (publish_a_free_block_with_others, "cannot be published"),
        (publish_a_receiving_block, "cannot be published"),
        (publish_a_reserved_block, "cannot be published"),
        (run_on_a_free_block, "has no owner"),
    ],
)
def test_each_misuse_is_an_error_and_breaks_nothing(
    misuse: Callable[[BlockPool], None], words: str
) -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match=words):
        misuse(pool)
    pool.check()


def lose_a_block(pool: BlockPool) -> None:
    pool.num_blocks += 1


def know_a_block_too_many(pool: BlockPool) -> None:
    pool.num_blocks -= 1


def forget_a_reference(pool: BlockPool) -> None:
    pool._references[pool.allocate(1, BlockUse.RUNNING)[0]] = 0


def forget_a_cached_hash(pool: BlockPool) -> None:
    (block,) = pool.allocate(1, BlockUse.RUNNING)
    pool.publish(block, b"h")
    pool.release([block])
    pool.prefix_cache.forget(block)


def keep_a_freed_hash(pool: BlockPool) -> None:
    (block,) = pool.allocate(1, BlockUse.RUNNING)
    pool.release([block])
    pool.prefix_cache.insert(b"h", block)


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        know_a_block_too_many,
        forget_a_reference,
        forget_a_cached_hash,
        keep_a_freed_hash,
    ],
)
def test_the_checker_notices_damage(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(3)
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_blocks_that_are_to_be_evicted_next_are_and_others_stay_as_they_are() -> None:
    pool, (a, b, c, d) = cached_pool(5, [b"a", b"b", b"c", b"d"])
    (free,) = pool.allocate(1, BlockUse.RUNNING)
    pool.acquire_cached([b])
    pool.evict_next([d, b, free, c])
    assert pool.next_evicted(5) == [d, c, a]
    assert (pool.num_free, pool.num_evicted, pool.num_taken) == (0, 0, 1)
    pool.allocate(2, BlockUse.RUNNING)
    assert (pool.next_evicted(1), pool.num_evicted, pool.num_taken) == ([a], 2, 3)
    pool.acquire_cached([b])
    assert pool.num_taken == 3, "it was held already"
    pool.check()


def test_the_latest_are_those_that_run_and_then_those_that_were_released_last() -> None:
    pool, (a, _, c, _) = cached_pool(5, [b"a", b"b", b"c", b"d"])
    pool.allocate(1, BlockUse.RUNNING)
    pool.acquire_cached([c])
    assert pool.latest(9) == [b"c", b"d", b"b", b"a"]
    assert pool.latest(2) == [b"c", b"d"]
    pool.release([c])
    assert pool.latest(9) == [b"c", b"d", b"b", b"a"]
    pool.acquire_cached([a])
    pool.release([a])
    assert pool.latest(9) == [b"a", b"c", b"d", b"b"]


def test_what_left_again_is_remembered_as_what_left_last() -> None:
    pool = BlockPool(1)
    pool.prefix_cache.remember(2)

    def passes(block_hash: bytes) -> bool:
        """Let a block come and go; return whether it counts as used again."""
        (block,) = pool.allocate(1, BlockUse.RUNNING)
        pool.publish(block, block_hash)
        is_reused = block in pool.prefix_cache.reused
        pool.release([block])
        return is_reused

    assert [passes(one) for one in (b"a", b"b", b"a")] == [False, False, True]
    assert [passes(one) for one in (b"c", b"a")] == [False, True]
