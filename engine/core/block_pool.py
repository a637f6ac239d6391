"""The pool of KV blocks: each is free, cached, running, reserved, receiving or quarantined.

A *cached* block is findable by its hash and referenced by nobody: it can be had by evicting it. A
*running* block is referenced by one or more sequences. A *receiving* block is written by another
node; a *reserved* one is held beside it for the first tokens to come. Both have one owner. A
*quarantined* block has none: its landing is over, but its writer may not know that yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from common.blocks import BlockHash
from engine.core.prefix_cache import PrefixCache


class BlockUse(Enum):
    """What a block that is neither free nor cached is held for."""

    RUNNING = "running"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """How many blocks are what; the sum is the pool."""

    free: int
    cached: int
    running: int
    reserved: int
    receiving: int
    quarantined: int

    @property
    def available(self) -> int:
        """Blocks that can be had now: free, or cached and evictable."""
        return self.free + self.cached


class BlockPool:
    """Ownership of `num_blocks` blocks. Misuse raises `ValueError`: nothing is freed twice."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.prefix_cache = PrefixCache()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: dict[int, None] = {}  # least recently released first
        self._references = [0] * num_blocks
        self._use: dict[int, BlockUse] = {}
        self._num_used = dict.fromkeys(BlockUse, 0)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    def is_evictable(self, block_id: int) -> bool:
        """Whether the block is cached and referenced by nobody."""
        return block_id in self._evictable

    def is_unshared(self, block_id: int) -> bool:
        """Whether the block would become available if its one holder let go of it."""
        return self._references[block_id] == 1

    def allocate(self, count: int, use: BlockUse) -> list[int]:
        """Take `count` blocks, free ones first, then the least recently used cached ones."""
        if count > self.num_available:
            raise ValueError(f"asked for {count} blocks, {self.num_available} are available")
        taken = [self._take_one() for _ in range(count)]
        for block_id in taken:
            self._references[block_id] = 1
            self._set_use(block_id, use)
        return taken

    def acquire_cached(self, block_ids: Iterable[int]) -> None:
        """Reference blocks that the prefix cache found, shared with whoever else runs on them."""
        for block_id in block_ids:
            if block_id in self._evictable:
                del self._evictable[block_id]
                self._set_use(block_id, BlockUse.RUNNING)
            elif self._use.get(block_id) is not BlockUse.RUNNING:
                raise ValueError(f"block {block_id} cannot be shared: it holds no finished KV")
            self._references[block_id] += 1

    def start_running(self, block_ids: Iterable[int]) -> None:
        """Received or reserved blocks now belong to a running sequence."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is held by nobody")
            self._num_used[self._use[block_id]] -= 1
            self._set_use(block_id, BlockUse.RUNNING)

    def quarantine(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks that were being received, held by nobody now until `release`."""
        taken = [b for b in block_ids if self._use.get(b) is BlockUse.RECEIVING]
        for block_id in taken:
            self._num_used[BlockUse.RECEIVING] -= 1
            self._set_use(block_id, BlockUse.QUARANTINED)
        return taken

    def publish(self, block_id: int, block_hash: BlockHash) -> None:
        """Make a block findable: its KV is complete and verified."""
        if self._use.get(block_id) is not BlockUse.RUNNING:
            raise ValueError(f"block {block_id} is not running and cannot be published")
        self.prefix_cache.insert(block_hash, block_id)

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each; the last one leaves the block cached if findable, else free.

        Later blocks are released first, so that a prefix outlives what continues it. A receiving
        block cannot be released: it is quarantined first, until its writer is known to be gone.
        """
        for block_id in reversed(list(block_ids)):
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is released but held by nobody")
            if self._use[block_id] is BlockUse.RECEIVING:
                raise ValueError(f"block {block_id} is released but another node may write it")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._num_used[self._use.pop(block_id)] -= 1
                if self.prefix_cache.holds(block_id):
                    self._evictable[block_id] = None
                else:
                    self._free.append(block_id)

    def counts(self) -> BlockCounts:
        """Where every block is."""
        return BlockCounts(
            free=len(self._free),
            cached=len(self._evictable),
            running=self._num_used[BlockUse.RUNNING],
            reserved=self._num_used[BlockUse.RESERVED],
            receiving=self._num_used[BlockUse.RECEIVING],
            quarantined=self._num_used[BlockUse.QUARANTINED],
        )

    def check(self) -> None:
        """Raise `AssertionError` unless every block is in exactly one place."""
        places = [*self._free, *self._evictable, *self._use]
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost or in two places"
        held = {b for b, count in enumerate(self._references) if count > 0}
        assert held == set(self._use), "references and uses disagree"
        uses = list(self._use.values())
        assert all(uses.count(use) == n for use, n in self._num_used.items()), "uses miscounted"
        assert all(self.prefix_cache.holds(b) for b in self._evictable), "cached but not findable"
        assert not any(self.prefix_cache.holds(b) for b in self._free), "free but findable"

    def _set_use(self, block_id: int, use: BlockUse) -> None:
        self._use[block_id] = use
        self._num_used[use] += 1

    def _take_one(self) -> int:
        if self._free:
            return self._free.pop()
        block_id = next(iter(self._evictable))
        del self._evictable[block_id]
        self.prefix_cache.forget(block_id)
        return block_id
