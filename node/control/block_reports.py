"""Reports of the blocks in the node's tiers, for each router. Used on the event loop alone.

A router gets all blocks when its stream opens, in pieces, and then the changes. What waits is kept
by block, so it is never more than the tiers have, and as much again that has left them. A report is
of one tier; all reports of a stream share one series of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from common.kv.blocks import KEY_BYTES, BlockHash
from common.kv.tiers import Tier
from engine.core.blocks.prefix_cache import TellsNews
from engine.core.scheduler import Scheduler
from protos import pdserve_node_pb2 as pb

MAX_REPORTED = 2048
"""Blocks in one message: 16 KiB."""
MIN_FORGOTTEN = 4096
"""Most waiting changes beyond the number of cached blocks; with more, all blocks are reported
again."""

News = Mapping[Tier, Mapping[BlockHash, bool]]
"""Blocks that have entered a tier (true), or left it."""


def tiers_of(scheduler: Scheduler) -> dict[Tier, TellsNews]:
    """Return what notes which blocks enter and leave, for each tier of a node."""
    tiers: dict[Tier, TellsNews] = {Tier.POOL: scheduler.pool.prefix_cache}
    if scheduler.host_pool.num_blocks:
        tiers[Tier.HOST] = scheduler.host_pool
    if scheduler.disk_prefixes.index is not None:
        tiers[Tier.DISK] = scheduler.disk_prefixes.index
    return tiers


class CachedBlocks:
    """The blocks in each tier, as the step thread last reported them."""

    def __init__(self) -> None:
        self._held: dict[Tier, dict[BlockHash, None]] = {tier: {} for tier in Tier}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def take(self, news: News) -> None:
        """Apply the changes of a step."""
        for tier, changed in news.items():
            held = self._held[tier]
            for block_hash, has_entered in changed.items():
                if has_entered:
                    held[block_hash] = None
                else:
                    held.pop(block_hash, None)

    def all(self) -> dict[Tier, dict[BlockHash, bool]]:
        """Return them as news to somebody who knows nothing."""
        return {tier: dict.fromkeys(held, True) for tier, held in self._held.items()}


class BlockReports:
    """The reports to one router."""

    def __init__(self, cached: CachedBlocks) -> None:
        self._cached = cached
        self._number = 0
        self._news = cached.all()

    def __len__(self) -> int:
        """Return how many changes wait."""
        return sum(map(len, self._news.values()))

    @property
    def is_behind(self) -> bool:
        """Whether more waits than one report holds."""
        return len(self) > MAX_REPORTED

    def add(self, news: News) -> None:
        """Add what `cached` has taken."""
        for tier, changed in news.items():
            self._news[tier].update(changed)
        if len(self) > 2 * len(self._cached) + MIN_FORGOTTEN:
            self.restart()

    def restart(self) -> None:
        """Report all blocks again."""
        self._number, self._news = 0, self._cached.all()

    def next(self) -> pb.BlockReport | None:
        """Return the next report; None: there is nothing to say.

        One of a nearer tier comes first, and the first of all is one of the pool.
        """
        tier = Tier.POOL
        if self._number:
            waiting = [tier for tier, news in self._news.items() if news]
            if not waiting:
                return None
            tier = waiting[0]
        self._number += 1
        news = self._news[tier]
        told = list(islice(news, MAX_REPORTED))
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        for block_hash in told:
            parts[news.pop(block_hash)].append(block_hash[:KEY_BYTES])
        return pb.BlockReport(
            number=self._number,
            added=b"".join(parts[True]),
            removed=b"".join(parts[False]),
            tier=tier,
        )
