"""Blocks of host memory: of preempted sequences, and of prefixes as far as those leave room.

Holds ids only; the runner copies the data. A block is free, *used* (it holds a sequence's KV, or is
being written) or a *prefix*, which is found by its hash. A prefix that no copy or transfer reads
gives way to whatever else needs the room: first what was copied back, and is in the cache; then
what was used once, as far as that is more than a tenth of all; then what was not used for longest.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import chain, islice

from common.kv.blocks import BlockHash
from engine.core.blocks.eviction import Segments
from engine.core.blocks.prefix_cache import PrefixCache

ONCE_SHARE = 0.1
"""The largest share of host memory for blocks that were used once."""


class HostPool:
    """Ownership of `num_blocks` host blocks. Misuse raises `ValueError`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()
        self._prefixes = PrefixCache()
        self._evictable: Segments[int] = Segments(int(ONCE_SHARE * num_blocks))
        """The prefixes that nothing reads."""
        self._readers: dict[int, int] = {}
        """How many copies and transfers read each of the others."""
        self._pinned: set[int] = set()
        self.unsaved: set[int] = set()
        """Prefixes that were used again since a lower tier was offered them."""

    @property
    def num_free(self) -> int:
        """Host blocks without owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Host blocks that hold a sequence's KV, or are being written."""
        return len(self._used)

    @property
    def num_prefixes(self) -> int:
        """Host blocks that are found by a hash."""
        return len(self._prefixes)

    @property
    def num_read(self) -> int:
        """Prefixes that copies and transfers read, and that therefore do not give way."""
        return len(self._readers)

    @property
    def num_pinned(self) -> int:
        """Prefixes that a lower tier is written from, and that do not give way either."""
        return len(self._pinned)

    @property
    def num_available(self) -> int:
        """Host blocks that `allocate` can hand out now: free ones, and prefixes that give way."""
        num_kept = sum(one not in self._readers for one in self._pinned)
        return len(self._free) + len(self._evictable) - num_kept

    @property
    def num_room_once(self) -> int:
        """The most host blocks for what was used once that take few from what was used again."""
        segments = self._evictable
        return len(self._free) + segments.num_elsewhere + segments.most_once

    def allocate(self, count: int, *, num_once: int = 0) -> list[int]:
        """Take `count` host blocks, free ones first; `ValueError` when fewer are available.

        `num_once` of them are for what was used once.
        """
        if count > self.num_available:
            raise ValueError(f"asked for {count} host blocks, {self.num_available} are free")
        num_evicted = max(count - len(self._free), 0)
        num_new = min(num_once, num_evicted)
        following = (one for one in self._evictable.in_order(num_new) if one not in self._pinned)
        for given_way in list(islice(following, num_evicted)):
            self._evict(given_way)
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, host_block_ids: Iterable[int]) -> None:
        """Free used host blocks; `ValueError` for one that is not in use."""
        for host_block_id in host_block_ids:
            if host_block_id not in self._used:
                raise ValueError(f"host block {host_block_id} is released but has no owner")
            self._used.remove(host_block_id)
            self._free.append(host_block_id)

    # --- prefixes ------------------------------------------------------------------------------

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the host block that holds what the hash names, if there is one."""
        return self._prefixes.find(block_hash)

    def holds(self, host_block_id: int) -> bool:
        """Return whether a host block is a prefix."""
        return self._prefixes.holds(host_block_id)

    def keep_news(self) -> None:
        """Note from now on which prefixes enter and leave; see `PrefixCache.keep_news`."""
        self._prefixes.keep_news()

    def take_news(self) -> dict[BlockHash, bool]:
        """Return the prefixes that entered (true) or left since the last call, in order."""
        return self._prefixes.take_news()

    def note_use(self, block_hash: BlockHash) -> bool:
        """Note that a prefix was used again, wherever; return whether it is here."""
        host_block_id = self._prefixes.find(block_hash)
        if host_block_id is not None:
            self.unsaved.add(host_block_id)
            if host_block_id not in self._readers:
                self._evictable.use(host_block_id)
        return host_block_id is not None

    def next_evicted(self, num_allocated: int) -> list[int]:
        """Return the prefixes that would be evicted if so many host blocks were allocated.

        The first one comes first.
        """
        return list(islice(self._evictable, max(num_allocated - len(self._free), 0)))

    def latest(self) -> Iterator[BlockHash]:
        """Return the hashes of all prefixes: those that are read, then those that were used last.

        Those that were used once come last. A block comes behind those before it in its prefix.
        """
        return map(self._prefixes.hash_of, chain(self._readers, self._evictable.latest()))

    def hash_of(self, host_block_id: int) -> BlockHash:
        """Return the hash of a prefix; `KeyError` for any other host block."""
        return self._prefixes.hash_of(host_block_id)

    def keep(
        self,
        host_block_ids: Iterable[int],
        hashes: Iterable[BlockHash],
        once: Container[BlockHash] = (),
    ) -> None:
        """Make used blocks, now completely written, findable; the last is evicted last.

        Those of `once` were used once. One whose hash is known already is freed. Raises
        `ValueError` for one that is not in use.
        """
        for host_block_id, block_hash in zip(host_block_ids, hashes, strict=True):
            self.release([host_block_id])
            if self._prefixes.find(block_hash) is None:
                self._free.pop()
                self._prefixes.insert(block_hash, host_block_id)
                if block_hash in once:
                    self._evictable.add(host_block_id)
                else:
                    self.unsaved.add(host_block_id)
                    self._evictable.use(host_block_id)

    def begin_reading(self, host_block_ids: Iterable[int]) -> None:
        """Keep these prefixes until as many calls of `end_reading`."""
        for host_block_id in host_block_ids:
            num_readers = self._readers.get(host_block_id, 0)
            if num_readers == 0:
                self._evictable.forget(host_block_id)
            self._readers[host_block_id] = num_readers + 1

    def end_reading(
        self, host_block_ids: Iterable[int], *, is_good: bool = True, is_in_cache: bool = True
    ) -> None:
        """Unpin these prefixes, evictable in reverse order; at once if reading has failed.

        They do so before others if they were copied to the cache, and else as what was used last.
        """
        for host_block_id in reversed(list(host_block_ids)):
            self._readers[host_block_id] -= 1
            if self._readers[host_block_id] == 0:
                del self._readers[host_block_id]
                if is_in_cache:
                    self._evictable.use_elsewhere(host_block_id)
                else:
                    self._evictable.use(host_block_id)
                if not is_good and host_block_id not in self._pinned:
                    self._evict(host_block_id)

    def pin(self, host_block_ids: Iterable[int]) -> None:
        """Keep these prefixes, none of them pinned, until `unpin`; that is no use of them."""
        self._pinned.update(host_block_ids)

    def unpin(self, host_block_ids: Iterable[int]) -> None:
        """Unpin these prefixes: they keep their places in the order of eviction."""
        self._pinned.difference_update(host_block_ids)

    def _evict(self, host_block_id: int) -> None:
        self._evictable.forget(host_block_id)
        self._prefixes.forget(host_block_id)
        self.unsaved.discard(host_block_id)
        self._free.append(host_block_id)

    def check(self) -> None:
        """Raise `AssertionError` unless every host block is free, used, or a prefix."""
        prefixes = [*self._evictable, *self._readers]
        assert sorted([*self._free, *self._used, *prefixes]) == list(range(self.num_blocks)), (
            "a host block is lost"
        )
        assert len(self._prefixes) == len(prefixes), "prefixes miscounted"
        findable = self._prefixes.block_ids()
        assert all(map(findable.__contains__, prefixes)), "a prefix that is not findable"
        assert self._pinned.issubset(prefixes), "a pinned prefix is lost"
        assert self.unsaved.issubset(prefixes), "offered to a lower tier, and no prefix"
        assert all(count > 0 for count in self._readers.values()), "readers miscounted"
