"""Cached prefixes on their way between two nodes: which blocks they hold, until nobody uses them.

A prefix *comes* behind blocks that are here: those are kept, and the blocks that another node
writes are findable when all of them were verified, never before. A prefix *goes* while a transfer
reads its blocks, in the pool and in host memory, where each of them is: nothing is copied for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, islice

from common.kv.blocks import BlockHash
from engine.core.blocks.block_pool import BlockUse
from engine.core.kept_prefixes import KeptPrefixes
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.sequence import Sequence
from engine.core.statistics import PullOutcome, StepCounters


@dataclass(frozen=True, slots=True, eq=False)
class ComingPrefix:
    """Another node writes `block_ids`, whose hashes are known; `kept_ids` come before them."""

    kept_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]


class PrefixTransfers:
    """The blocks of one node that are held for prefixes on their way.

    `on_taken` is called when blocks are taken between two plans.
    """

    def __init__(
        self,
        prefixes: PrefixIndex,
        kept: KeptPrefixes,
        counters: StepCounters,
        on_taken: Callable[[], None],
    ) -> None:
        self._pool, self._host_pool = prefixes.pool, kept.host_pool
        self._prefixes, self._kept = prefixes, kept
        self._block_size = prefixes.block_size
        self._counters = counters
        self._on_taken = on_taken
        self._coming: set[ComingPrefix] = set()
        self._failed: set[ComingPrefix] = set()
        self._going: list[tuple[int, ...]] = []
        """What transfers read, by the numbers of `pin`."""

    def __len__(self) -> int:
        """Return how many prefixes hold blocks."""
        return len(self._coming) + len(self._failed) + len(self._going)

    @property
    def held_block_ids(self) -> set[int]:
        """All blocks of the pool that are held here, also those that others hold too."""
        coming = [(*one.kept_ids, *one.block_ids) for one in self._coming]
        failed = [one.block_ids for one in self._failed]
        going, _ = self.split(self.sent_ids)
        return set(chain(*coming, *failed, going))

    @property
    def sent_ids(self) -> set[int]:
        """What transfers read, by the numbers of `pin`."""
        return set(chain.from_iterable(self._going))

    @property
    def host_block_ids_read(self) -> set[int]:
        """Host blocks that transfers read."""
        return set(self.split(self.sent_ids)[1])

    @property
    def num_quarantined(self) -> int:
        """Blocks of failed prefixes that another node may still write."""
        return sum(len(prefix.block_ids) for prefix in self._failed)

    @property
    def are_of_use(self) -> bool:
        """Whether prompts look for cached prefixes at all."""
        return self._prefixes.is_enabled

    def count_sent(self, source_ids: tuple[int, ...], num_read: int) -> None:
        """Count the blocks of a prefix that has landed on another node, by where they were.

        So many of those in host memory had been read from disk for it.
        """
        block_ids, host_block_ids = self.split(source_ids)
        num_host = len(host_block_ids) - num_read
        self._counters.on_prefix_sent(pool=len(block_ids), host=num_host, disk=num_read)

    def count(self, outcome: PullOutcome, num_tokens: int, *, is_fetched: bool = False) -> None:
        """Count what became of a prefix of so many tokens that another node has cached."""
        self._counters.on_pull(outcome, num_tokens, is_fetched=is_fetched)

    def missing(self, sequence: Sequence, num_tokens: int) -> tuple[list[int], list[BlockHash]]:
        """Return the cached blocks of a sequence, and the hashes of those behind them that are in
        no tier here, of its first `num_tokens`. The sequence is not queued yet.

        What is in host memory counts as used, and what is being read from disk for the sequence is
        here: both are copied into the pool when it is admitted.
        """
        kept_ids = self._prefixes.match(sequence)
        num_behind = max(num_tokens // self._block_size - len(kept_ids), 0)
        behind = islice(self._prefixes.hashes_behind(sequence, len(kept_ids)), num_behind)
        is_read = sequence.sought_on_disk
        return kept_ids, [one for one in behind if one not in is_read and not self.has(one)]

    def has(self, block_hash: BlockHash) -> bool:
        """Return whether a block is in memory; one of host memory counts as used."""
        is_cached = self._pool.prefix_cache.find(block_hash) is not None
        return is_cached or self._host_pool.note_use(block_hash)

    def latest(self, count: int) -> tuple[BlockHash, ...]:
        """Return the hashes of at most `count` blocks in memory, those that were used last first.

        What only host memory has comes behind what the pool has.
        """
        in_pool, cache = self._pool.latest(count), self._pool.prefix_cache
        below = (one for one in self._host_pool.latest() if cache.find(one) is None)
        return (*in_pool, *islice(below, count - len(in_pool)))

    def has_room(self, kept_ids: Items[int], num_blocks: int) -> bool:
        """Return whether so many blocks behind `kept_ids` can begin to come, and nothing is lost.

        What they evict is in host memory then, as far as it is to be. It is true as well where the
        pool has no room for them, which `begin` says.
        """
        return self._kept.has_room(num_blocks, kept_ids)

    def make_room(self, kept_ids: Items[int], num_blocks: int) -> bool:
        """Return what `has_room` does, and if not copy out what lacks, some with the next plan."""
        has_room = self._kept.make_room(num_blocks, kept_ids)
        if not has_room:
            self._on_taken()  # a late copy holds blocks
        return has_room

    def begin(self, kept_ids: Items[int], block_hashes: Items[BlockHash]) -> ComingPrefix | None:
        """Take blocks for those with these hashes, behind `kept_ids`; None: there is no room."""
        self._pool.acquire_cached(kept_ids)
        if len(block_hashes) > self._pool.num_available:
            self._pool.release(kept_ids)
            return None
        block_ids = self._pool.allocate(len(block_hashes), BlockUse.RECEIVING)
        coming = ComingPrefix(tuple(kept_ids), tuple(block_ids), tuple(block_hashes))
        self._coming.add(coming)
        self._on_taken()
        return coming

    def land(self, prefix: ComingPrefix, num_blocks: int | None = None) -> None:
        """Make the first `num_blocks` of a prefix findable, or all, which were verified.

        The others are free. Raises `KeyError` if it failed.
        """
        self._coming.remove(prefix)
        self._pool.start_running(prefix.block_ids)
        blocks = zip(prefix.block_ids, prefix.block_hashes, strict=True)
        for block_id, block_hash in islice(blocks, num_blocks):
            self._pool.publish(block_id, block_hash)
        self._pool.release((*prefix.kept_ids, *prefix.block_ids))

    def fail(self, prefix: ComingPrefix) -> None:
        """Give up a prefix; its blocks stay quarantined until `free`. Twice is once."""
        if prefix in self._coming:
            self._coming.remove(prefix)
            self._failed.add(prefix)
            self._pool.quarantine(prefix.block_ids)
            self._pool.release(prefix.kept_ids)

    def free(self, prefix: ComingPrefix) -> None:
        """Free the blocks of a failed prefix, which nobody can write any more."""
        self._failed.remove(prefix)
        self._pool.release(prefix.block_ids)

    def pin(self, block_hashes: Items[BlockHash], *, may_be_short: bool = False) -> tuple[int, ...]:
        """Keep the blocks with these hashes for a transfer, and return their numbers for it.

        A block that only host memory has is numbered behind those of the pool. One that is in
        neither, or with which transfers would keep more than half of the pool or of host memory,
        and those behind it are not kept; then none is, unless it `may_be_short`.
        """
        source_ids = self._beginning(block_hashes)
        if not source_ids or (len(source_ids) < len(block_hashes) and not may_be_short):
            return ()
        self._keep(source_ids)
        return source_ids

    def pin_some(self, block_hashes: Items[BlockHash], num_read: int) -> tuple[int, ...] | None:
        """Keep those of these blocks that memory has, while `num_read` others are read from disk.

        None: transfers would then keep more than half of the pool, or of host memory.
        """
        source_ids = self._found(block_hashes)
        if not self._has_room(source_ids, num_read):
            return None
        self._keep(source_ids)
        return source_ids

    def unpin(self, source_ids: tuple[int, ...]) -> None:
        """Release blocks that no transfer reads, and that are kept for none, any more."""
        self._going.remove(source_ids)
        block_ids, host_block_ids = self.split(source_ids)
        self._pool.release(block_ids)
        self._host_pool.end_reading(host_block_ids, is_in_cache=False)

    def split(self, source_ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return which blocks of the pool, and which host blocks, numbers of `pin` are."""
        block_ids: list[int] = []
        host_block_ids: list[int] = []
        num_blocks = self._pool.num_blocks
        for one in source_ids:
            if one < num_blocks:
                block_ids.append(one)
            else:
                host_block_ids.append(one - num_blocks)
        return block_ids, host_block_ids

    def _found(self, block_hashes: Items[BlockHash]) -> tuple[int, ...]:
        found = map(self._find, block_hashes)
        return tuple(one for one in found if one is not None)

    def _beginning(self, block_hashes: Items[BlockHash]) -> tuple[int, ...]:
        """Return the first of these blocks, as far as they are in memory and may be kept."""
        sent, num_blocks = self.sent_ids, self._pool.num_blocks
        in_pool, in_host = self.split(sent)
        room = num_blocks // 2 - len(in_pool)
        host_room = self._host_pool.num_blocks // 2 - len(in_host)
        source_ids: list[int] = []
        for source_id in map(self._find, block_hashes):
            if source_id is None:
                break
            if source_id not in sent:
                room -= source_id < num_blocks
                host_room -= source_id >= num_blocks
            if min(room, host_room) < 0:
                break
            source_ids.append(source_id)
        return tuple(source_ids)

    def _has_room(self, source_ids: tuple[int, ...], num_more: int) -> bool:
        """Return whether these may be kept too, and so many more host blocks."""
        in_pool, in_host = self.split(self.sent_ids.union(source_ids))
        is_too_much = len(in_pool) > self._pool.num_blocks // 2
        is_too_much |= len(in_host) + num_more > self._host_pool.num_blocks // 2
        return not is_too_much

    def _keep(self, source_ids: tuple[int, ...]) -> None:
        block_ids, host_block_ids = self.split(source_ids)
        if any(map(self._pool.is_evictable, block_ids)):
            self._on_taken()  # they cannot be evicted any more
        self._pool.acquire_cached(block_ids)
        self._host_pool.begin_reading(host_block_ids)
        self._going.append(source_ids)

    def _find(self, block_hash: BlockHash) -> int | None:
        block_id = self._pool.prefix_cache.find(block_hash)
        if block_id is not None:
            return block_id
        host_block_id = self._host_pool.find(block_hash)
        return None if host_block_id is None else self._pool.num_blocks + host_block_id
