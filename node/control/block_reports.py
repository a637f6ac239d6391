"""What each router is told about the blocks in the node's prefix cache. Belongs to the event loop.

A router is told all when its stream opens, in pieces, and then what changes. What waits is kept by
block, so it is never more than the cache has, and as much again that has left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from common.kv.blocks import KEY_BYTES, BlockHash
from protos import pdserve_node_pb2 as pb

MAX_REPORTED = 2048
"""Blocks in one message: 16 KiB."""
MIN_FORGOTTEN = 4096
"""Waiting changes beyond the blocks that are cached; with more, a router is told all again."""

News = Mapping[BlockHash, bool]
"""Blocks that have entered the cache (true), or left it."""


class CachedBlocks:
    """The blocks in the prefix cache, as far as the step thread has told."""

    def __init__(self) -> None:
        self._held: dict[BlockHash, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, news: News) -> None:
        """Take what has changed."""
        for block_hash, has_entered in news.items():
            if has_entered:
                self._held[block_hash] = None
            else:
                self._held.pop(block_hash, None)

    def all(self) -> dict[BlockHash, bool]:
        """Return them as news to somebody who knows nothing."""
        return dict.fromkeys(self._held, True)


class BlockReports:
    """The reports to one router."""

    def __init__(self, cached: CachedBlocks) -> None:
        self._cached = cached
        self._number = 0
        self._news = cached.all()

    def __len__(self) -> int:
        """Return how many changes wait."""
        return len(self._news)

    @property
    def is_behind(self) -> bool:
        """Whether more waits than one report holds."""
        return len(self._news) > MAX_REPORTED

    def add(self, news: News) -> None:
        """Add what `cached` has taken."""
        self._news.update(news)
        if len(self._news) > 2 * len(self._cached) + MIN_FORGOTTEN:
            self.restart()

    def restart(self) -> None:
        """Tell all again."""
        self._number, self._news = 0, self._cached.all()

    def next(self) -> pb.BlockReport | None:
        """Return the next report; None: there is nothing to say."""
        if not self._news and self._number:
            return None
        self._number += 1
        told = list(islice(self._news, MAX_REPORTED))
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        for block_hash in told:
            parts[self._news.pop(block_hash)].append(block_hash[:KEY_BYTES])
        return pb.BlockReport(
            number=self._number, added=b"".join(parts[True]), removed=b"".join(parts[False])
        )
