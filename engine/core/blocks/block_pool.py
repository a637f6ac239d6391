"""The pool of KV blocks: each is free, cached, running, reserved, receiving or quarantined.

A *cached* block can be found by its hash and has no references; it can be evicted. A *running*
block is referenced by one or more sequences. A *receiving* block is written by another node; a
*reserved* block is held with it for the first output tokens. Both have one owner. A *quarantined*
block has no owner: its landing is closed, but its writer may not know that yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain, compress, islice
from typing import NamedTuple

from common.kv.blocks import BlockHash
from engine.core.blocks.prefix_cache import PrefixCache


class BlockUse(Enum):
    """What a block that is neither free nor cached is held for."""

    RUNNING = "running"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    QUARANTINED = "quarantined"

    # Uses are counted for every block that is taken or released; `Enum` hashes a name in Python.
    __hash__ = object.__hash__


class BlockCounts(NamedTuple):
    """The number of blocks in each state; the sum is `num_blocks`."""

    free: int
    cached: int
    running: int
    reserved: int
    receiving: int
    quarantined: int

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free, or cached and evictable."""
        return self.free + self.cached


class BlockPool:
    """Ownership of `num_blocks` blocks. Misuse raises `ValueError`: no block is freed twice."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.prefix_cache = PrefixCache()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """The one released longest ago first."""
        self._references = [0] * num_blocks
        self._use: dict[int, BlockUse] = {}
        self._num_used = dict.fromkeys(BlockUse, 0)
        self.num_evicted = 0
        """Cached blocks that made room since the start."""
        self.num_allocated = 0
        """Blocks that were handed out since the start."""
        self.num_taken = 0
        """Cached blocks that were evicted or acquired since the start: no longer the next ones."""

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_free(self) -> int:
        """Blocks without owner that hold nothing."""
        return len(self._free)

    def next_evicted(self, num_allocated: int) -> list[int]:
        """Return the blocks that would be evicted if so many were allocated, the first first."""
        return list(islice(self._evictable, max(num_allocated - len(self._free), 0)))

    def evict_next(self, block_ids: Iterable[int]) -> None:
        """Evict these blocks next, in this order, as far as they may be evicted."""
        for block_id in reversed(list(block_ids)):
            if block_id in self._evictable:
                self._evictable.move_to_end(block_id, last=False)

    def latest(self, count: int) -> list[BlockHash]:
        """Return the hashes of at most `count` findable blocks, those that were used last first.

        Those that run are in use now. A block comes behind those before it in its prefix.
        """
        running = filter(self._use.__contains__, self.prefix_cache.block_ids())
        latest = islice(chain(running, reversed(self._evictable)), count)
        return [self.prefix_cache.hash_of(block_id) for block_id in latest]

    def is_evictable(self, block_id: int) -> bool:
        """Return whether the block is cached and has no references."""
        return block_id in self._evictable

    def is_unshared(self, block_id: int) -> bool:
        """Return whether the block has exactly one reference: releasing that makes it available."""
        return self._references[block_id] == 1

    def allocate(self, count: int, use: BlockUse) -> list[int]:
        """Take `count` blocks, free ones first, then the least recently used cached ones.

        Raises `ValueError` when fewer are available.
        """
        if count > self.num_available:
            raise ValueError(f"asked for {count} blocks, {self.num_available} are available")
        self.num_allocated += count
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        if len(taken) < count:
            pop = self._evictable.popitem
            evicted = [pop(last=False)[0] for _ in range(count - len(taken))]
            self.prefix_cache.forget_all(evicted)
            taken += evicted
            self.num_evicted += len(evicted)
            self.num_taken += len(evicted)
        references = self._references
        for block_id in taken:
            references[block_id] = 1
        self._use.update(dict.fromkeys(taken, use))
        self._num_used[use] += count
        return taken

    def acquire_cached(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of `block_ids`, which the prefix cache found.

        Raises `ValueError` for a block that is neither cached nor running.
        """
        for block_id in block_ids:
            if block_id in self._evictable:
                del self._evictable[block_id]
                self.num_taken += 1
                self._set_use(block_id, BlockUse.RUNNING)
            elif self._use.get(block_id) is not BlockUse.RUNNING:
                raise ValueError(f"block {block_id} cannot be shared: it holds no finished KV")
            self._references[block_id] += 1

    def start_running(self, block_ids: Iterable[int]) -> None:
        """Give received or reserved blocks to a running sequence.

        Raises `ValueError` for a block without owner.
        """
        given, running = list(block_ids), BlockUse.RUNNING
        before = [self._use[block_id] for block_id in given if block_id in self._use]
        if len(before) < len(given):
            owned = self._use.keys()
            raise ValueError(f"block {next(b for b in given if b not in owned)} has no owner")
        for use in set(before):
            self._num_used[use] -= before.count(use)
        self._num_used[running] += len(given)
        self._use.update(dict.fromkeys(given, running))

    def quarantine(self, block_ids: Iterable[int]) -> list[int]:
        """Quarantine the receiving ones of `block_ids`, until `release`, and return them."""
        taken = [b for b in block_ids if self._use.get(b) is BlockUse.RECEIVING]
        for block_id in taken:
            self._num_used[BlockUse.RECEIVING] -= 1
            self._set_use(block_id, BlockUse.QUARANTINED)
        return taken

    def publish(self, block_id: int, block_hash: BlockHash) -> None:
        """Make a running block findable by its hash; `ValueError` if it does not run.

        Its KV must be complete and verified.
        """
        if self._use.get(block_id) is not BlockUse.RUNNING:
            raise ValueError(f"block {block_id} is not running and cannot be published")
        self.prefix_cache.insert(block_hash, block_id)

    def publish_all(self, block_ids: Sequence[int], block_hashes: Sequence[BlockHash]) -> None:
        """Make blocks of one prefix findable; `ValueError` if one of them does not run."""
        if set(map(self._use.get, block_ids)) != {BlockUse.RUNNING}:
            raise ValueError(f"one of {block_ids} is not running and cannot be published")
        self.prefix_cache.insert_all(block_hashes, block_ids)

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each; without any, a block is cached if findable, else free.

        Later blocks are released first, so that a prefix is evicted after its continuations. Raises
        `ValueError` for a block without references, and for a receiving block: that one is
        quarantined until its writer is known to have stopped.
        """
        references, uses, receiving = self._references, self._use, BlockUse.RECEIVING
        findable, num_released = self.prefix_cache.block_ids(), 0
        evictable, free, running = self._evictable, self._free, BlockUse.RUNNING
        try:
            for block_id in reversed(list(block_ids)):
                num_left = references[block_id] - 1
                if num_left < 0:
                    raise ValueError(f"block {block_id} is released but has no owner")
                use = uses[block_id]
                if use is receiving:
                    raise ValueError(f"block {block_id} is released but another node may write it")
                references[block_id] = num_left
                if num_left == 0:
                    del uses[block_id]
                    if use is running:
                        num_released += 1
                    else:
                        self._num_used[use] -= 1
                    if block_id in findable:
                        evictable[block_id] = None
                    else:
                        free.append(block_id)
        finally:
            self._num_used[running] -= num_released

    def use_of(self, block_id: int) -> BlockUse | None:
        """Return what a block is held for; None: it is free or cached."""
        return self._use.get(block_id)

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state."""
        return BlockCounts(
            free=len(self._free),
            cached=len(self._evictable),
            running=self._num_used[BlockUse.RUNNING],
            reserved=self._num_used[BlockUse.RESERVED],
            receiving=self._num_used[BlockUse.RECEIVING],
            quarantined=self._num_used[BlockUse.QUARANTINED],
        )

    def check(self) -> None:
        """Raise `AssertionError` unless every block is in exactly one state."""
        block_ids = [*self._free, *self._evictable, *self._use]
        assert sorted(block_ids) == list(range(self.num_blocks)), "a block is lost or in two states"
        held = set(compress(range(self.num_blocks), self._references))
        assert held == self._use.keys(), "references and uses disagree"
        assert min(self._references, default=0) >= 0, "released more often than taken"
        num_used = dict.fromkeys(self._num_used, 0)
        for use in self._use.values():
            num_used[use] += 1
        assert num_used == self._num_used, "uses miscounted"
        findable = self.prefix_cache.block_ids()
        assert self._evictable.keys() <= findable, "cached but not findable"
        assert findable.isdisjoint(self._free), "free but findable"

    def _set_use(self, block_id: int, use: BlockUse) -> None:
        self._use[block_id] = use
        self._num_used[use] += 1
