"""Host blocks: allocated, released, never twice."""

from __future__ import annotations

import pytest

from engine.core.blocks.host_pool import HostPool


def test_places_are_taken_and_given_back() -> None:
    pool = HostPool(3)
    first = pool.allocate(2)
    assert (pool.num_free, pool.num_used, len(set(first))) == (1, 2, 2)
    (last,) = pool.allocate(1)
    assert {*first, last} == {0, 1, 2}
    pool.release(first)
    assert (pool.num_free, pool.num_used) == (2, 1)
    assert set(pool.allocate(2)) == set(first)
    pool.check()


def test_a_pool_without_places_gives_none() -> None:
    pool = HostPool(0)
    assert pool.allocate(0) == []
    pool.release([])
    with pytest.raises(ValueError, match="asked for 1 host blocks, 0 are free"):
        pool.allocate(1)
    pool.check()


@pytest.mark.parametrize("released", [[2], [0, 0]])
def test_a_place_is_not_given_back_in_vain(released: list[int]) -> None:
    pool = HostPool(3)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(ValueError, match="has no owner"):
        pool.release(released)
    pool.check()


# --- prefixes ------------------------------------------------------------------------------------

A, B, C = (bytes([n]) * 32 for n in range(3))


def kept(pool: HostPool, *hashes: bytes) -> list[int]:
    taken = pool.allocate(len(hashes))
    pool.keep(taken, hashes)
    pool.check()
    return taken


def test_a_prefix_is_found_until_its_place_is_needed() -> None:
    pool = HostPool(3)
    first, second = kept(pool, A, B)
    assert (pool.find(A), pool.find(B), pool.find(C)) == (first, second, None)
    assert (pool.num_free, pool.num_used, pool.num_prefixes, pool.num_available) == (1, 0, 2, 3)
    assert len(pool.allocate(2)) == 2
    assert (pool.find(A), pool.find(B)) == (None, second)
    pool.check()


def test_a_prefix_that_was_used_again_gives_way_later() -> None:
    pool = HostPool(2)
    first, _ = kept(pool, A, B)
    assert pool.note_use(A)
    assert not pool.note_use(C)
    pool.allocate(1)
    assert (pool.find(A), pool.find(B)) == (first, None)


@pytest.mark.covers("F126")
def test_a_prefix_that_is_read_does_not_give_way_before_all_have_read_it() -> None:
    pool = HostPool(1)
    block_ids = kept(pool, A)
    pool.begin_reading(block_ids)
    pool.begin_reading(block_ids)
    pool.end_reading(block_ids)
    assert pool.note_use(A)
    assert pool.num_available == 0
    pool.check()
    pool.end_reading(block_ids)
    assert pool.num_available == 1
    assert pool.allocate(1) == block_ids


def test_what_could_not_be_read_is_found_no_more() -> None:
    pool = HostPool(2)
    block_ids = kept(pool, A, B)
    pool.begin_reading(block_ids)
    pool.end_reading(block_ids, is_good=False)
    assert (pool.num_free, pool.num_prefixes) == (2, 0)
    pool.check()


def test_what_was_copied_back_gives_way_before_all_else_until_it_is_used_again() -> None:
    pool = HostPool(3)
    a, b, c = kept(pool, A, B, C)
    pool.begin_reading([b, c])
    pool.end_reading([b, c])
    assert pool.next_evicted(3) == [c, b, a]
    pool.note_use(C)
    assert pool.next_evicted(3) == [b, a, c]
    pool.check()


def once(pool: HostPool, *hashes: bytes) -> list[int]:
    taken = pool.allocate(len(hashes), num_once=len(hashes))
    pool.keep(taken, hashes, hashes)
    pool.check()
    return taken


def test_only_what_free_blocks_do_not_hold_is_evicted() -> None:
    pool = HostPool(4)
    a, b = kept(pool, A, B)
    assert [pool.next_evicted(count) for count in (2, 3, 4)] == [[], [a], [a, b]]


def test_what_goes_to_free_blocks_evicts_nothing_that_was_used_once() -> None:
    pool = HostPool(20)
    (first,) = once(pool, A)
    again = kept(pool, *(bytes([n]) * 32 for n in range(10, 26)))
    assert pool.num_free == 3
    pool.allocate(4, num_once=4)
    assert (pool.holds(first), pool.holds(again[0])) == (True, False)
    pool.check()


def test_what_was_used_once_takes_a_tenth_from_what_was_used_again() -> None:
    pool = HostPool(20)
    again = kept(pool, *(bytes([n]) * 16 for n in range(20)))
    first = once(pool, b"x")
    assert first == again[:1]
    second = once(pool, b"y")
    assert second == again[1:2]
    assert once(pool, b"z") == first, "it makes room for what else comes once"
    assert pool.num_room_once == 2
    pool.note_use(b"y")
    assert once(pool, b"w") == again[2:3], "what is used again is no more counted"
    assert pool.next_evicted(20)[-3:] == [*second, *first, *again[2:3]]


def test_what_was_used_once_is_kept_while_there_is_room_and_no_longer() -> None:
    pool = HostPool(20)
    kept(pool, *(bytes([n]) * 16 for n in range(10)))
    many = once(pool, *(bytes([n]) * 16 for n in range(100, 110)))
    assert pool.num_prefixes == 20
    assert pool.next_evicted(8) == many[:8]
    pool.allocate(9)
    assert pool.find(bytes([0]) * 16) is None
    assert [pool.find(bytes([n]) * 16) is None for n in range(100, 110)] == [True] * 8 + [False] * 2


def test_what_was_used_once_is_offered_to_no_lower_tier_before_it_is_used_again() -> None:
    pool = HostPool(10)
    [a] = once(pool, A)
    assert pool.unsaved == set()
    pool.note_use(A)
    assert pool.unsaved == {a}


def test_the_start_of_what_was_read_gives_way_last() -> None:
    pool = HostPool(3)
    block_ids = kept(pool, A, B, C)
    pool.begin_reading(block_ids)
    pool.end_reading(block_ids)
    pool.allocate(2)
    assert [pool.find(one) is not None for one in (A, B, C)] == [True, False, False]


def test_the_same_prefix_is_kept_once() -> None:
    pool = HostPool(2)
    kept(pool, A)
    kept(pool, A)
    assert (pool.num_free, pool.num_prefixes) == (1, 1)


def test_only_a_used_place_becomes_a_prefix() -> None:
    pool = HostPool(2)
    block_ids = kept(pool, A)
    with pytest.raises(ValueError, match="has no owner"):
        pool.keep(block_ids, [B])
    with pytest.raises(ValueError, match="has no owner"):
        pool.release(block_ids)
    pool.check()


def test_the_checker_notices_a_lost_and_a_doubled_place() -> None:
    lost, doubled = HostPool(3), HostPool(3)
    lost._free.pop()
    doubled._free += doubled.allocate(1)
    for pool in (lost, doubled):
        with pytest.raises(AssertionError, match="a host block is lost"):
            pool.check()


def test_what_is_pinned_keeps_its_turn_and_does_not_give_way() -> None:
    pool = HostPool(3)
    a, b, c = (kept(pool, one)[0] for one in (A, B, C))
    pool.pin([a])
    assert (pool.num_available, pool.num_pinned) == (2, 1)
    assert pool.next_evicted(3) == [a, b, c]
    pool.release(pool.allocate(1))
    assert [pool.find(one) is not None for one in (A, B, C)] == [True, False, True]
    with pytest.raises(ValueError, match="asked for 3 host blocks, 2 are free"):
        pool.allocate(3)
    pool.check()
    pool.unpin([a])
    pool.allocate(2)
    assert [pool.find(one) is not None for one in (A, C)] == [False, True]
    pool.check()


def test_what_is_pinned_and_read_is_counted_once_and_kept_for_both() -> None:
    pool = HostPool(2)
    [a] = kept(pool, A)
    pool.pin([a])
    pool.begin_reading([a])
    assert pool.num_available == 1
    pool.end_reading([a], is_good=False)
    assert pool.find(A) == a, "freed while it is written from"
    assert pool.num_available == 1
    pool.unpin([a])
    assert pool.num_available == 2
    pool.check()


def test_a_prefix_is_unsaved_after_each_use_until_it_is_gone() -> None:
    pool = HostPool(2)
    [a] = kept(pool, A)
    assert pool.unsaved == {a}
    pool.unsaved.remove(a)
    pool.note_use(B)
    assert pool.unsaved == set()
    pool.note_use(A)
    assert pool.unsaved == {a}
    pool.allocate(2)
    assert pool.unsaved == set()
    pool.check()


def test_what_enters_and_leaves_is_told_of_prefixes_alone() -> None:
    pool = HostPool(2)
    kept(pool, A)
    pool.keep_news()
    assert pool.take_news() == {}
    kept(pool, B)
    pool.allocate(1)
    assert pool.take_news() == {B: True, A: False}
    pool.allocate(1)
    assert pool.take_news() == {B: False}
    assert pool.take_news() == {}


def test_the_latest_are_those_that_are_read_and_those_used_once_come_last() -> None:
    pool = HostPool(20)
    a, b, c = kept(pool, A, B, C)
    (first,), (second,) = once(pool, b"x" * 16), once(pool, b"y" * 16)
    assert (pool.hash_of(first), pool.hash_of(second)) == (b"x" * 16, b"y" * 16)
    assert list(pool.latest()) == [C, B, A, b"y" * 16, b"x" * 16]
    pool.begin_reading([a, b])
    assert list(pool.latest()) == [A, B, C, b"y" * 16, b"x" * 16]
    pool.end_reading([a, b])  # into the cache
    assert list(pool.latest()) == [A, B, C, b"y" * 16, b"x" * 16]
    pool.begin_reading([c])
    pool.end_reading([c], is_in_cache=False)
    pool.note_use(B)
    assert list(pool.latest()) == [A, B, C, b"y" * 16, b"x" * 16]
