"""Host blocks under any work: none is lost, none that is needed gives way, and scans stay small."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv.blocks import BlockHash
from engine.core.blocks.eviction import Segments
from engine.core.blocks.host_pool import ONCE_SHARE, HostPool
from tests.property.engine.strategies import fixed


class Work:
    """Random calls of a host pool by what copies out, reads, writes to disk and swaps."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.rng, self.pool = random.Random(seed), HostPool(num_blocks)
        self.most_once = int(ONCE_SHARE * num_blocks)
        self.names = (b"%d" % number for number in count())
        self.swapped: list[list[int]] = []
        self.readings: list[list[int]] = []
        self.pinned: list[int] = []
        self.used_again: set[BlockHash] = set()
        self.happened: Counter[str] = Counter()

    def one(self) -> None:
        before = {one: self.pool.hash_of(one) for one in self.kept()}
        action = self.rng.choice((self.copy_out, self.swap, self.free, self.read, self.use))
        action()
        self.rng.choice((self.end_read, self.pin, self.unpin))()
        self.happened[action.__name__] += 1
        for one, block_hash in before.items():
            if one in self.kept():
                assert self.pool.find(block_hash) == one, "it gave way and is needed"
        self.pool.check()

    def kept(self) -> set[int]:
        return {one for reading in self.readings for one in reading} | set(self.pinned)

    def copy_out(self) -> None:
        """Some were used once; as the scheduler does, no more of these than there is room for."""
        most = min(self.pool.num_available, self.rng.randint(1, 8))
        num_once = min(self.rng.randint(0, most), self.pool.num_room_once)
        hashes = [next(self.names) for _ in range(most)]
        once = set(hashes[:num_once])
        num_first = self.pool.num_room_once - self.most_once  # free, or in the cache
        num_again = self.num_again()
        num_once_before = self.pool.num_prefixes - num_again
        taken = self.pool.allocate(most, num_once=num_once)
        num_taken = num_again - self.num_again()
        self.pool.keep(taken, hashes, once)
        self.used_again |= set(hashes) - once
        num_for_once = num_taken - num_first - (most - num_once)
        if num_for_once > 0:
            assert num_for_once <= self.most_once - num_once_before, "a scan takes too much"
            self.happened["once for again"] += 1

    def num_again(self) -> int:
        return sum(self.pool.find(one) is not None for one in self.used_again)

    def swap(self) -> None:
        num = self.rng.randint(0, min(3, self.pool.num_available))
        self.swapped.append(self.pool.allocate(num))

    def free(self) -> None:
        while len(self.swapped) > 2:
            self.pool.release(self.swapped.pop(0))

    def read(self) -> None:
        ids = self.pool.next_evicted(self.pool.num_blocks)
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randint(0, 4)))
        self.pool.begin_reading(chosen)
        self.used_again |= set(map(self.pool.hash_of, chosen))
        self.readings.append(chosen)

    def end_read(self) -> None:
        if self.readings:
            ended = self.readings.pop(0)
            self.pool.end_reading(ended, is_good=self.rng.random() < 0.8)

    def use(self) -> None:
        for one in self.pool.next_evicted(self.pool.num_blocks)[:2]:
            block_hash = self.pool.hash_of(one)
            assert self.pool.note_use(block_hash)
            self.used_again.add(block_hash)

    def pin(self) -> None:
        ids = [one for one in self.pool.unsaved if one not in self.kept()]
        assert all(self.pool.hash_of(one) in self.used_again for one in ids), "for a lower tier"
        if ids and not self.pinned:
            self.pinned = ids[:2]
            self.pool.pin(self.pinned)

    def unpin(self) -> None:
        self.pool.unpin(self.pinned)
        self.pinned = []


@pytest.mark.covers("F126", "F127")
def test_no_work_loses_a_host_block_or_what_is_needed() -> None:
    happened: Counter[str] = Counter()

    @fixed
    @given(st.integers(0, 40), st.integers(0, 1 << 30))
    def run(num_blocks: int, seed: int) -> None:
        work = Work(num_blocks, seed)
        for _ in range(60):
            work.one()
        happened.update(work.happened)
        # What was asked for is all done at the end, and everything can be had again.
        for reading in work.readings:
            work.pool.end_reading(reading)
        work.unpin()
        for swapped in work.swapped:
            work.pool.release(swapped)
        assert len(work.pool.allocate(num_blocks)) == num_blocks

    run()
    assert len(happened) == 6, happened


@pytest.mark.covers("F127")
@fixed
@given(
    st.integers(1, 200),
    st.lists(st.integers(1, 30), min_size=1, max_size=30),
    st.booleans(),
)
def test_a_scan_of_what_is_used_once_takes_at_most_a_tenth(
    num_blocks: int, sizes: list[int], has_read: bool
) -> None:
    """However it comes, and whatever of the rest was copied back and used again."""
    pool = HostPool(num_blocks)
    hot = [b"hot %d" % number for number in range(num_blocks)]
    pool.keep(pool.allocate(num_blocks), hot)
    if has_read:
        pool.begin_reading(range(num_blocks))
        pool.end_reading(range(num_blocks))
        for one in hot:
            pool.note_use(one)
    names = (b"cold %d" % number for number in count())
    for size in sizes:
        num_once = min(size, pool.num_room_once)
        hashes = [next(names) for _ in range(num_once)]
        pool.keep(pool.allocate(num_once, num_once=num_once), hashes, set(hashes))
        pool.check()
    num_left = sum(pool.find(one) is not None for one in hot)
    assert num_left >= num_blocks - int(ONCE_SHARE * num_blocks)


@fixed
@given(st.integers(0, 6), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40))
def test_segments_hold_each_block_once_and_in_the_order_of_their_uses(
    most_once: int, uses: list[tuple[int, int]]
) -> None:
    segments: Segments[int] = Segments(most_once)
    model: dict[int, int] = {}
    for kind, block in uses:
        if kind == 0 and block in model:
            segments.forget(block)
            del model[block]
            continue
        [segments.add, segments.use, segments.use_elsewhere][kind](block)
        model.pop(block, None)
        model[block] = kind
    once, again, elsewhere = ([b for b, k in model.items() if k == kind] for kind in range(3))
    assert (len(segments), segments.num_once) == (len(model), len(once))
    for num_new in (0, 1, 5):
        num_first = max(len(once) + num_new - most_once, 0)
        order = [*elsewhere, *once[:num_first], *again, *once[num_first:]]
        assert list(segments.in_order(num_new)) == order
    with pytest.raises(KeyError):
        segments.forget(99)
