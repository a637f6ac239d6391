"""Which blocks of the pool are copied to host memory, and how far ahead of their eviction.

That follows from what steps took lately, of free blocks too, so it is known before the first
eviction: what is copied too early is twice in memory meanwhile. What was used once is copied as far
as uses of other blocks pay for it: where nothing is asked for again, nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Set
from itertools import takewhile

from engine.core.blocks.block_pool import BlockPool
from engine.core.blocks.host_pool import HostPool

LEAST_AHEAD = 16
"""How many allocations ahead of its eviction a block is copied out, at least."""
STEPS_AHEAD = 3
"""Steps ahead, counted as those that took most blocks lately."""
_FORGOTTEN = 0.999
"""The factor on the blocks that a step took, for each step after it."""

USE_PAYS = 16
"""A use of a block that was used before pays for copying so many that were used once. Computing a
block takes a hundred times as long as copying it, and one use shows that there will be others."""
REMEMBERED = 4
"""Multiple of the blocks of both pools that are remembered by hash after their eviction: a block
that is computed again was used again. Turns of a conversation are further apart than a pool holds.
"""


class LeavingBlocks:
    """The blocks of `pool` that are evicted next, as far as `host_pool` is to have them."""

    def __init__(self, pool: BlockPool, host_pool: HostPool, *, is_enabled: bool) -> None:
        self._pool, self._host_pool = pool, host_pool
        self._num_blocks = pool.num_blocks + host_pool.num_blocks
        if is_enabled:
            pool.prefix_cache.remember(REMEMBERED * self._num_blocks)
        self._most_taken = 0.0
        """Blocks that a step has taken, the most of late."""
        self._num_allocated = self._num_used_again = 0
        self._num_paid = 0
        """How many blocks that were used once may be copied: at most as many as both pools have."""
        self._saved_until = 0
        """The count of taken blocks until which those that are evicted are saved."""
        self.order: list[int] = []
        """The blocks to be evicted next, in order, as of the last choice."""

    def near(self, num_growing: int = 0) -> list[int]:
        """Return the blocks to be evicted next, if one of the first half of them is unsaved.

        That half has a block for each of `num_growing` sequences, which may take one in the same
        step. What is saved is not looked at again before so many have left the order of eviction.
        """
        unsaved, pool = self._pool.prefix_cache.unsaved, self._pool
        num_ahead = max(self._look_ahead(), 2 * num_growing)
        num_near = num_ahead // 2 - pool.num_free
        if not unsaved or self._saved_until - pool.num_taken >= num_near:
            return []
        ahead = pool.next_evicted(num_ahead)
        num_saved = sum(1 for _ in takewhile(lambda one: one not in unsaved, ahead))
        self._saved_until = pool.num_taken + num_saved
        return ahead if num_saved < num_near else []

    def evicted_by(self, num_allocated: int, kept: Set[int]) -> list[int]:
        """Return the blocks that allocating so many evicts, none of `kept`, if one is unsaved.

        Of more than host memory has room for, the first ones are not to be saved: the others would
        take their place.
        """
        unsaved, pool = self._pool.prefix_cache.unsaved, self._pool
        num_evicted = num_allocated - pool.num_free
        if not unsaved or self._saved_until - pool.num_taken >= num_evicted + len(kept):
            return []
        ahead = pool.next_evicted(num_allocated + len(kept))
        evicted = [one for one in ahead if one not in kept][: max(num_evicted, 0)]
        found = [one for one in evicted if one in unsaved]
        num_beyond = max(len(found) - self._host_pool.num_available, 0)
        unsaved.difference_update(found[:num_beyond])
        return evicted if num_beyond < len(found) else []

    def choose(self, ahead: list[int], most: int) -> list[int]:
        """Return the blocks of `ahead` that are to be copied now, at most `most`.

        They are saved from now on. What is evicted last comes first, as in a sequence: both pools
        release in that order. Host memory must have room for `most`.
        """
        cache, host_pool = self._pool.prefix_cache, self._host_pool
        chosen = list(filter(cache.unsaved.__contains__, ahead))
        wanted = [one for one in chosen if host_pool.find(cache.hash_of(one)) is None]
        once = [one for one in wanted if one not in cache.reused]
        # They would make room for each other: the last ones stay.
        most_once = min(host_pool.num_room_once, self._earn())
        dropped = set(once[: max(len(once) - most_once, 0)])
        block_ids = [one for one in wanted if one not in dropped]
        if len(block_ids) > most:  # the others are chosen again with the next step
            del block_ids[most:]
            del chosen[chosen.index(block_ids[-1]) + 1 :]
        if chosen:
            self.order = ahead[: ahead.index(chosen[-1]) + 1]
        for one in chosen:
            host_pool.note_use(cache.hash_of(one))
        cache.unsaved.difference_update(chosen)  # once for each use
        block_ids.reverse()
        return block_ids

    def allocate_for(self, block_ids: list[int]) -> list[int]:
        """Return host blocks for blocks that were chosen."""
        reused = self._pool.prefix_cache.reused
        num_once = sum(one not in reused for one in block_ids)
        self._num_paid -= num_once
        return self._host_pool.allocate(len(block_ids), num_once=num_once)

    def _earn(self) -> int:
        """Return how many blocks that were used once may be copied now."""
        num_uses = self._pool.prefix_cache.num_used_again - self._num_used_again
        self._num_used_again += num_uses
        self._num_paid = min(self._num_paid + USE_PAYS * num_uses, self._num_blocks)
        return self._num_paid

    def _look_ahead(self) -> int:
        """Return how many allocations ahead of its eviction a block is to be copied out."""
        num_taken = self._pool.num_allocated - self._num_allocated
        self._num_allocated += num_taken
        self._most_taken = max(_FORGOTTEN * self._most_taken, num_taken)
        wanted = math.ceil(STEPS_AHEAD * self._most_taken)
        return max(min(wanted, self._pool.num_blocks), LEAST_AHEAD)
