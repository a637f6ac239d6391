"""Which blocks are in files on disk, how many bytes they have, and which file makes room first.

A node writes and removes files in a folder of its own. It reads those of other nodes of its host as
well, which come and go without a word: what is known of them is what was seen last.
"""

from __future__ import annotations

from collections import OrderedDict

from common.kv.blocks import BlockHash
from engine.core.blocks.disk_jobs import OWN_FOLDER, DiskScan, FileName
from engine.core.blocks.eviction import LeastRecentlyUsed

FILE_SYSTEM_BLOCK_BYTES = 4096
"""What a file takes is counted in these."""


def bytes_taken(num_bytes: int) -> int:
    """Return what a file of so many bytes takes of the bound."""
    return -(-num_bytes // FILE_SYSTEM_BLOCK_BYTES) * FILE_SYSTEM_BLOCK_BYTES


class DiskIndex:
    """Files of `file_bytes` each, those of this node within `max_bytes`."""

    def __init__(self, max_bytes: int, file_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._file_bytes = bytes_taken(file_bytes)
        self._own: LeastRecentlyUsed[BlockHash] = LeastRecentlyUsed()
        self._strangers: OrderedDict[str, int] = OrderedDict()
        """Files of other models or layouts in this node's folder, and their bytes."""
        self._stranger_bytes = 0
        self._others: dict[BlockHash, str] = {}
        """Blocks in the folders of other nodes, and which folder that is."""
        self._news: dict[BlockHash, bool] | None = None

    def __len__(self) -> int:
        """Return how many blocks this node has on disk."""
        return len(self._own)

    @property
    def num_bytes(self) -> int:
        """The bytes that count against the bound."""
        return len(self._own) * self._file_bytes + self._stranger_bytes

    @property
    def most_blocks(self) -> int:
        """How many blocks the bound allows."""
        return self.max_bytes // self._file_bytes

    @property
    def num_others(self) -> int:
        """How many blocks other nodes were seen to have."""
        return len(self._others)

    def find(self, block_hash: BlockHash) -> str | None:
        """Return the folder with a block, or `OWN_FOLDER`; None: it is on no disk."""
        return OWN_FOLDER if block_hash in self._own else self._others.get(block_hash)

    def use(self, block_hash: BlockHash) -> None:
        """Note that a block was used, wherever."""
        if block_hash in self._own:
            self._own.use(block_hash)

    def make_room(self, num_blocks: int) -> list[FileName]:
        """Forget as many files as that many more blocks need, and return them, to be removed.

        `ValueError` for more than `most_blocks`.
        """
        if num_blocks > self.most_blocks:
            raise ValueError(f"room for {num_blocks} blocks: at most {self.most_blocks}")
        removed: list[FileName] = []
        wanted = num_blocks * self._file_bytes
        while self.num_bytes + wanted > self.max_bytes:
            if self._strangers:
                name, num_bytes = self._strangers.popitem(last=False)
                self._stranger_bytes -= num_bytes
                removed.append(name)
            else:
                block_hash = self._own.first()
                self._own.forget(block_hash)
                self._tell(block_hash)
                removed.append(block_hash)
        return removed

    def add(self, block_hash: BlockHash) -> None:
        """Add a block that was written completely; there must be room."""
        self._own.use(block_hash)
        self._tell(block_hash)

    def forget(self, block_hash: BlockHash, folder: str) -> None:
        """Remove a block that is not in this folder, or must not be used."""
        if folder != OWN_FOLDER:
            if self._others.get(block_hash) == folder:
                del self._others[block_hash]
        elif block_hash in self._own:
            self._own.forget(block_hash)
        self._tell(block_hash)

    def take_own(self, scan: DiskScan) -> None:
        """Replace the blocks known of this node's folder."""
        before = list(self._own)
        self._own = LeastRecentlyUsed()
        for block_hash in scan.own:
            self._own.use(block_hash)
        self._strangers = OrderedDict((name, bytes_taken(size)) for name, size in scan.strangers)
        self._stranger_bytes = sum(self._strangers.values())
        self._tell(*before, *scan.own)

    def take_others(self, others: dict[BlockHash, str]) -> None:
        """Replace the blocks known of other nodes' folders.

        The index keeps `others` and changes it.
        """
        before, self._others = self._others, others
        if self._news is not None:
            # In their order: that of a set of hashes is another one in each process.
            self._tell(*(one for one in before if one not in others))
            self._tell(*(one for one in others if one not in before))

    # --- news, as of the prefix cache -----------------------------------------------------------

    def keep_news(self) -> None:
        """Note from now on what enters and leaves, until `take_news`, which must then be called."""
        self._news = {}

    def take_news(self) -> dict[BlockHash, bool]:
        """Return the blocks that entered (true) or left the disk since the last call, in order."""
        news, self._news = self._news or {}, None if self._news is None else {}
        return news

    def _tell(self, *block_hashes: BlockHash) -> None:
        if self._news is not None:
            for block_hash in block_hashes:
                self._news[block_hash] = self.find(block_hash) is not None

    def check(self) -> None:
        """Raise `AssertionError` if the bound is broken, or bytes are miscounted."""
        assert self._stranger_bytes == sum(self._strangers.values()), "bytes miscounted"
