"""Which block holds which prefix."""

from __future__ import annotations

import pytest

from common.kv.blocks import hash_full_blocks
from engine.core.blocks.prefix_cache import PrefixCache


def cache_of(*pairs: tuple[bytes, int]) -> PrefixCache:
    cache = PrefixCache()
    for block_hash, block_id in pairs:
        cache.insert(block_hash, block_id)
    return cache


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ([], []),
        ([b"a"], [7]),
        ([b"a", b"b", b"c"], [7, 3]),
        ([b"b"], [3]),
        ([b"x", b"a"], []),
        ([b"a", b"x", b"b"], [7]),
    ],
)
def test_a_match_is_the_longest_run_from_the_first_hash_on(
    asked: list[bytes], found: list[int]
) -> None:
    assert cache_of((b"a", 7), (b"b", 3)).match(asked) == found


@pytest.mark.covers("F43")
def test_block_0_is_a_block_like_any_other() -> None:
    assert cache_of((b"a", 0), (b"b", 1)).match([b"a", b"b"]) == [0, 1]


def test_the_first_block_with_a_hash_stays() -> None:
    cache = cache_of((b"a", 1), (b"a", 2))
    assert cache.match([b"a"]) == [1]
    assert (cache.holds(1), cache.holds(2)) == (True, False)


def test_a_block_keeps_its_first_hash() -> None:
    cache = cache_of((b"a", 1), (b"b", 1))
    assert cache.match([b"b"]) == []
    cache.forget(1)
    assert not cache.holds(1)
    assert cache.match([b"a"]) == []


def test_what_was_forgotten_can_be_found_in_another_block_later() -> None:
    cache = cache_of((b"a", 1))
    cache.forget(1)
    cache.insert(b"a", 2)
    assert cache.match([b"a"]) == [2]


@pytest.mark.covers("V04")
def test_a_hash_covers_model_layout_and_every_token_before_it() -> None:
    base = hash_full_blocks(range(12), 4, "model")
    assert len(base) == 3
    assert hash_full_blocks(range(15), 4, "model") == base
    assert hash_full_blocks(range(8), 4, "model") == base[:2]
    changed = hash_full_blocks([0, 1, 99, 3, 4, 5, 6, 7, 8, 9, 10, 11], 4, "model")
    assert not set(base) & set(changed)
    assert not set(base) & set(hash_full_blocks(range(12), 4, "another model"))
    assert not set(base) & set(hash_full_blocks(range(12), 2, "model")[:1])


def test_news_are_kept_only_when_somebody_takes_them() -> None:
    cache = PrefixCache()
    cache.insert(b"a", 1)
    assert cache.take_news() == {}
    cache.keep_news()
    cache.insert(b"b", 2)
    cache.insert(b"b", 3)
    cache.insert(b"c", 4)
    cache.forget(4)
    assert cache.take_news() == {b"b": True, b"c": False}
    assert cache.take_news() == {}
    cache.forget(1)
    cache.insert(b"a", 5)
    assert cache.take_news() == {b"a": True}


def test_a_hash_that_comes_again_was_used_again_while_it_is_remembered() -> None:
    cache = PrefixCache()
    cache.remember(2)
    for block_id, block_hash in enumerate((b"a", b"b", b"c")):
        cache.insert(block_hash, block_id)
    for block_id in (2, 1, 0):
        cache.forget(block_id)
    for block_id, block_hash in enumerate((b"a", b"b", b"c")):
        cache.insert(block_hash, block_id)
    assert cache.reused == {0, 1}
    cache.forget(0)
    assert cache.reused == {1}
    cache.insert(b"a", 3)
    assert cache.reused == {1, 3}


def test_what_was_used_is_unsaved_until_it_is_offered_or_gone_where_there_is_a_lower_tier() -> None:
    cache, alone = PrefixCache(), PrefixCache()
    cache.remember(2)
    for one in (cache, alone):
        one.insert(b"a", 0)
        one.insert(b"b", 1)
        one.insert(b"b", 2)
    assert (cache.unsaved, alone.unsaved) == ({0, 1}, set())
    cache.unsaved.clear()
    for one in (cache, alone):
        one.note_use([1])
    assert (cache.unsaved, cache.reused, cache.num_used_again) == ({1}, {1}, 1)
    assert (alone.unsaved, alone.reused, alone.num_used_again) == (set(), set(), 0)
    cache.forget(1)
    assert (cache.unsaved, cache.reused) == (set(), set())
    cache.insert(b"b", 1)
    assert (cache.unsaved, cache.reused, cache.num_used_again) == ({1}, {1}, 2)


@pytest.mark.parametrize("num_remembered", [0, 4])
@pytest.mark.parametrize("known", [(), ((b"b", 9),), ((b"x", 2),)], ids=str)
def test_blocks_that_enter_or_leave_together_do_so_as_one_after_the_other(
    num_remembered: int, known: tuple[tuple[bytes, int], ...]
) -> None:
    """Also where a hash, or a block, is findable already, and where a lower tier is kept."""
    names, block_ids = [b"a", b"b", b"c"], [1, 2, 3]
    together, apart = PrefixCache(), PrefixCache()
    for cache in (together, apart):
        cache.remember(num_remembered)
        for block_hash, block_id in known:
            cache.insert(block_hash, block_id)
        cache.keep_news()
    together.insert_all(names, block_ids)
    for block_hash, block_id in zip(names, block_ids, strict=True):
        apart.insert(block_hash, block_id)
    assert vars(together) == vars(apart)
    gone = list(apart.block_ids())[::-1]
    together.forget_all(gone)
    for block_id in gone:
        apart.forget(block_id)
    assert vars(together) == vars(apart)
    assert list(together.take_news().items()) == list(apart.take_news().items())
    assert not len(together)
