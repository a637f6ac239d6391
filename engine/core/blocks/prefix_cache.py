"""Map prefixes to the blocks that hold their KV. Hashes and ids only: the pool owns the blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from typing import Protocol

from common.kv.blocks import BlockHash


class TellsNews(Protocol):
    """A tier of blocks that are found by their hashes."""

    def keep_news(self) -> None:
        """Note from now on what enters and leaves, until `take_news`, which must then be called."""

    def take_news(self) -> dict[BlockHash, bool]:
        """Return the blocks that entered (true) or left since the last call, in order."""


class PrefixCache:
    """A map from block hash to block and back.

    A hash covers all tokens before it, so a match of consecutive hashes from the first block on is
    a match of the whole prefix.
    """

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self.reused: set[int] = set()
        """Findable blocks that were used again, as far as their user notes it."""
        self.unsaved: set[int] = set()
        """Findable blocks that were used since a lower tier was offered them, if there is one."""
        self.num_used_again = 0
        """How often blocks were used again since the start, if there is a lower tier."""
        self._most_remembered = 0
        self._left: OrderedDict[BlockHash, None] = OrderedDict()
        self._news: dict[BlockHash, bool] | None = None

    def __len__(self) -> int:
        return len(self._block_of)

    def __repr__(self) -> str:
        return f"PrefixCache({self._hash_of})"

    def keep_news(self) -> None:
        """Note from now on what enters and leaves, until `take_news`, which must then be called."""
        self._news = {}

    def take_news(self) -> dict[BlockHash, bool]:
        """Return the blocks that entered (true) or left since the last call, in order."""
        news = self._news
        if not news:
            return {}
        self._news = {}
        return news

    def remember(self, num_left: int) -> None:
        """Keep `unsaved`, and take one of the last `num_left` that have left as used again."""
        self._most_remembered = num_left

    def note_use(self, block_ids: Iterable[int]) -> None:
        """Note that findable blocks were used again, if there is a lower tier."""
        if self._most_remembered:
            used = set(block_ids)
            self.reused |= used
            self.unsaved |= used
            self.num_used_again += len(used)

    def match(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached prefix, in order."""
        found: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def block_ids(self) -> KeysView[int]:
        """Return the findable blocks, those that became so first first."""
        return self._hash_of.keys()

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block with this hash, if there is one."""
        return self._block_of.get(block_hash)

    def hash_of(self, block_id: int) -> BlockHash:
        """Return the hash of a findable block; `KeyError` for any other one."""
        return self._hash_of[block_id]

    def insert_all(self, block_hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        """Make blocks findable, each as `insert` does; those of a long prompt are new together."""
        is_known = self._most_remembered or not self._hash_of.keys().isdisjoint(block_ids)
        if is_known or not self._block_of.keys().isdisjoint(block_hashes):
            for block_hash, block_id in zip(block_hashes, block_ids, strict=True):
                self.insert(block_hash, block_id)
            return
        self._block_of.update(zip(block_hashes, block_ids, strict=True))
        self._hash_of.update(zip(block_ids, block_hashes, strict=True))
        if self._news is not None:
            self._news.update(dict.fromkeys(block_hashes, True))

    def insert(self, block_hash: BlockHash, block_id: int) -> None:
        """Make a block findable. If its hash is known already, the first block stays in the map."""
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash
            if self._most_remembered:
                self.unsaved.add(block_id)
            if block_hash in self._left:
                del self._left[block_hash]
                self.reused.add(block_id)
                self.num_used_again += 1
            if self._news is not None:
                self._news[block_hash] = True

    def holds(self, block_id: int) -> bool:
        """Return whether the block is findable."""
        return block_id in self._hash_of

    def forget_all(self, block_ids: Sequence[int]) -> None:
        """Remove blocks that are about to be overwritten, in this order."""
        if self._most_remembered or self.reused or self.unsaved:
            for block_id in block_ids:
                self.forget(block_id)
            return
        block_hashes = list(map(self._hash_of.pop, block_ids))
        for block_hash in block_hashes:
            del self._block_of[block_hash]
        if self._news is not None:
            self._news.update(dict.fromkeys(block_hashes, False))

    def forget(self, block_id: int) -> None:
        """Remove a block that is about to be overwritten."""
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        self.reused.discard(block_id)
        self.unsaved.discard(block_id)
        if self._most_remembered:
            self._left[block_hash] = None
            if len(self._left) > self._most_remembered:
                self._left.popitem(last=False)
        if self._news is not None:
            self._news[block_hash] = False
