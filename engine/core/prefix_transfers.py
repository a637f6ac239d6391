"""Cached prefixes on their way between two pools: which blocks they hold, until nobody uses them.

A prefix *comes* behind blocks that are here: those are kept, and the blocks that another node
writes are findable when all of them were verified, never before. A prefix *goes* while a transfer
reads its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from common.kv.blocks import BlockHash
from engine.core.blocks.block_pool import BlockUse
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.sequence import NO_SEAT, Sequence
from engine.core.statistics import PullOutcome, StepCounters


@dataclass(frozen=True, slots=True, eq=False)
class ComingPrefix:
    """Another node writes `block_ids`, whose hashes are known; `kept_ids` come before them."""

    kept_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]


class PrefixTransfers:
    """The blocks of one pool that are held for prefixes on their way.

    `on_taken` is called when blocks are taken between two plans.
    """

    def __init__(
        self, prefixes: PrefixIndex, counters: StepCounters, on_taken: Callable[[], None]
    ) -> None:
        self._pool = prefixes.pool
        self._prefixes = prefixes
        self._block_size = prefixes.block_size
        self._counters = counters
        self._on_taken = on_taken
        self._coming: set[ComingPrefix] = set()
        self._failed: set[ComingPrefix] = set()
        self._going: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        """Return how many prefixes hold blocks."""
        return len(self._coming) + len(self._failed) + len(self._going)

    @property
    def held_block_ids(self) -> set[int]:
        """All blocks that are held here, also those that others hold too."""
        coming = [(*one.kept_ids, *one.block_ids) for one in self._coming]
        failed = [one.block_ids for one in self._failed]
        return set(chain.from_iterable((*coming, *failed, *self._going)))

    @property
    def num_quarantined(self) -> int:
        """Blocks of failed prefixes that another node may still write."""
        return sum(len(prefix.block_ids) for prefix in self._failed)

    def count(self, outcome: PullOutcome, num_tokens: int) -> None:
        """Count what became of a prefix of so many tokens that another node has cached."""
        self._counters.on_pull(outcome, num_tokens)

    def begin(self, sequence: Sequence, num_tokens: int) -> ComingPrefix | None:
        """Take blocks for those of a sequence's first tokens that are not cached here.

        `num_tokens`, a multiple of the block size, can come from another node. Returns None if
        none of them is missing, or where there is no room for all that are. The sequence is not
        queued yet.
        """
        kept_ids = self._prefixes.match(sequence)
        block_hashes = sequence.block_hashes[len(kept_ids) : num_tokens // self._block_size]
        if not block_hashes:
            return None
        self._pool.acquire_cached(kept_ids)
        if len(block_hashes) > self._pool.num_available:
            self._pool.release(kept_ids)
            return None
        block_ids = self._pool.allocate(len(block_hashes), BlockUse.RECEIVING)
        coming = ComingPrefix(tuple(kept_ids), tuple(block_ids), tuple(block_hashes))
        self._coming.add(coming)
        self._on_taken()
        return coming

    def land(self, prefix: ComingPrefix) -> None:
        """Make a prefix findable, all of which was verified. Raises `KeyError` if it failed."""
        self._coming.remove(prefix)
        self._pool.start_running(prefix.block_ids)
        for block_id, block_hash in zip(prefix.block_ids, prefix.block_hashes, strict=True):
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

    def pin(self, sequence: Sequence, first: int, count: int) -> tuple[int, ...]:
        """Keep `count` blocks of a seated sequence, from block `first` on, for a transfer.

        Returns them; none if not all of them were cached when it was seated.
        """
        end = first + count
        if sequence.seat == NO_SEAT or end * self._block_size > sequence.num_cached_tokens:
            return ()
        block_ids = tuple(sequence.block_table[first:end])
        self._pool.acquire_cached(block_ids)
        self._going.append(block_ids)
        return block_ids

    def unpin(self, block_ids: tuple[int, ...]) -> None:
        """Release blocks that no transfer reads any more."""
        self._going.remove(block_ids)
        self._pool.release(block_ids)
