"""Cached prefixes on their way between two pools: which blocks they hold, until nobody uses them.

A prefix *comes* behind blocks that are here: those are kept, and the blocks that another node
writes are findable when all of them were verified, never before. A prefix *goes* while a transfer
reads its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, islice

from common.kv.blocks import BlockHash
from engine.core.blocks.block_pool import BlockUse
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

    @property
    def are_of_use(self) -> bool:
        """Whether prompts look for cached prefixes at all."""
        return self._prefixes.is_enabled

    def count(self, outcome: PullOutcome, num_tokens: int, *, is_fetched: bool = False) -> None:
        """Count what became of a prefix of so many tokens that another node has cached."""
        self._counters.on_pull(outcome, num_tokens, is_fetched=is_fetched)

    def missing(self, sequence: Sequence, num_tokens: int) -> tuple[list[int], list[BlockHash]]:
        """Return the cached blocks of a sequence, and the hashes of those behind them that are
        not cached, of its first `num_tokens`. The sequence is not queued yet.
        """
        kept_ids = self._prefixes.match(sequence)
        num_missing = max(num_tokens // self._block_size - len(kept_ids), 0)
        behind = self._prefixes.hashes_behind(sequence, len(kept_ids))
        return kept_ids, list(islice(behind, num_missing))

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

    def pin(self, block_hashes: Items[BlockHash]) -> tuple[int, ...]:
        """Keep the cached blocks with these hashes for a transfer, and return them.

        Returns none if one of them is not cached, or if transfers would keep more than half of the
        pool.
        """
        found = [self._pool.prefix_cache.find(block_hash) for block_hash in block_hashes]
        block_ids = tuple(block_id for block_id in found if block_id is not None)
        kept = set(chain(block_ids, *self._going))
        if len(block_ids) < len(found) or len(kept) > self._pool.num_blocks // 2:
            return ()
        self._pool.acquire_cached(block_ids)
        self._going.append(block_ids)
        return block_ids

    def unpin(self, block_ids: tuple[int, ...]) -> None:
        """Release blocks that no transfer reads any more."""
        self._going.remove(block_ids)
        self._pool.release(block_ids)
