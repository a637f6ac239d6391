"""Prefixes that go from host memory to files on disk before they are evicted there, and come back.

Everything passes host memory: a block is written from there ahead of its eviction, and one that is
read lands there and is a prefix in host memory then like any other, which an admission copies into
the pool, or a transfer sends. So the pool, plans and steps know nothing of a disk. Until a job has
ended, what it writes from is kept, and what it reads into is used and cannot be found.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain

from common.kv.blocks import BlockHash
from engine.core.blocks.disk_index import DiskIndex
from engine.core.blocks.disk_jobs import DiskFailure, DiskRead, DiskResult, DiskScan, DiskWrite
from engine.core.blocks.host_pool import HostPool
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.sequence import Sequence
from engine.core.statistics import DiskEvent, DiskSize, StepCounters

LOOK_AHEAD_BLOCKS = 256
"""How many allocations ahead of its eviction from host memory a block is written."""
MOST_BLOCKS_WRITTEN = 8
"""The most blocks of one job. Further ones follow when it has ended."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What memory lacks and the disk has: blocks to be read, and reads that bring some."""

    hashes: list[BlockHash]
    awaited: list[DiskRead]
    sought: frozenset[BlockHash]
    """The blocks of both."""
    num_blocks: int
    """How many of the requested blocks are in memory after the read."""


class DiskPrefixes:
    """The jobs between `host_pool` and a disk. Without an `index` there is no disk."""

    def __init__(
        self,
        host_pool: HostPool,
        prefixes: PrefixIndex,
        counters: StepCounters,
        index: DiskIndex | None,
    ) -> None:
        self.index = index
        self.may_write = False
        """Whether what is in this node's folder is known, and files may be written there."""
        self._host_pool, self._prefixes, self._counters = host_pool, prefixes, counters
        self._write: DiskWrite | None = None
        self._reads: list[DiskRead] = []
        self._coming: dict[BlockHash, DiskRead] = {}

    @property
    def size(self) -> DiskSize:
        """What is on disk."""
        if self.index is None:
            return DiskSize()
        return DiskSize(len(self.index), self.index.num_bytes, self.index.num_others)

    @property
    def num_read_into(self) -> int:
        """Host blocks that reads write."""
        return sum(len(read.host_block_ids) for read in self._reads)

    @property
    def num_written_from(self) -> int:
        """Host blocks that a write reads."""
        return 0 if self._write is None else len(self._write.host_block_ids)

    def count(self, event: DiskEvent, num: int = 1) -> None:
        """Count something that the disk did, or did not."""
        self._counters.disk[event] += num

    # --- out --------------------------------------------------------------------------------------

    def begin_write(self) -> DiskWrite | None:
        """Begin to write what would be evicted next, one job at a time; None: nothing is."""
        index, host_pool = self.index, self._host_pool
        if index is None or not self.may_write or self._write is not None:
            return None
        host_block_ids = self._choose(index)
        if not host_block_ids and index.num_bytes <= index.max_bytes:
            return None
        hashes = [host_pool.hash_of(one) for one in host_block_ids]
        self._write = DiskWrite(host_block_ids, hashes, index.make_room(len(hashes)))
        self.count(DiskEvent.REMOVED, len(self._write.removed))
        host_pool.pin(host_block_ids)
        return self._write

    def _choose(self, index: DiskIndex) -> list[int]:
        """Choose host blocks to be written, each once after each use."""
        host_pool = self._host_pool
        # Never more than half of what others could allocate.
        most = min(MOST_BLOCKS_WRITTEN, index.most_blocks, host_pool.num_available // 2)
        if not host_pool.unsaved or most == 0:
            return []
        candidates = host_pool.next_evicted(LOOK_AHEAD_BLOCKS)
        chosen: list[int] = []
        if host_pool.unsaved.isdisjoint(candidates):
            return chosen
        for host_block_id in candidates:
            if host_block_id not in host_pool.unsaved:
                continue
            host_pool.unsaved.remove(host_block_id)
            block_hash = host_pool.hash_of(host_block_id)
            if index.find(block_hash) is not None:
                index.use(block_hash)
                continue
            chosen.append(host_block_id)
            if len(chosen) == most:
                break
        return chosen

    def end_write(self, write: DiskWrite, result: DiskResult) -> None:
        """Add the written blocks.

        After a failure nothing is written until this node's folder was listed.
        """
        assert self.index is not None, "there is no disk"
        assert self._write is write, "another write"
        self._write = None
        self._host_pool.unpin(write.host_block_ids)
        for block_hash in write.hashes[: result.num_done]:
            self.index.add(block_hash)
        self.count(DiskEvent.WRITTEN, result.num_done)
        if result.failure is not None:
            self.may_write = False
            self._host_pool.unsaved.update(write.host_block_ids[result.num_done :])
            self.count(DiskEvent.WRITE_FAILED)

    # --- in ---------------------------------------------------------------------------------------

    def find(self, sequence: Sequence) -> OnDisk | None:
        """Return what a waiting sequence lacks and the disk has, up to the first block of none."""
        if self._has_nothing:
            return None
        num_cached = len(self._prefixes.match(sequence))
        return self.find_blocks(list(self._prefixes.hashes_behind(sequence, num_cached)))

    def find_blocks(self, block_hashes: Items[BlockHash]) -> OnDisk | None:
        """Return which of these the disk has and no memory, up to the first block of none.

        Together with those that host memory has they are no more than half of that.
        """
        index, pool, host_pool = self.index, self._prefixes.pool, self._host_pool
        if index is None or self._has_nothing:
            return None
        hashes: list[BlockHash] = []
        coming: list[BlockHash] = []
        num_blocks = 0
        room = min(host_pool.num_blocks // 2 - self.num_read_into, host_pool.num_available)
        for block_hash in block_hashes:
            if block_hash in self._coming:
                coming.append(block_hash)
            elif host_pool.note_use(block_hash):
                room -= 1  # it must not be evicted for the rest
                if len(hashes) > room:
                    break
            elif pool.prefix_cache.find(block_hash) is None:
                is_missed = index.find(block_hash) is None
                if is_missed:
                    self.count(DiskEvent.MISSED, len(block_hashes) - num_blocks)
                if is_missed or len(hashes) >= room:
                    break
                hashes.append(block_hash)
            num_blocks += 1
        if not hashes and not coming:
            return None
        awaited = list(dict.fromkeys(map(self._coming.__getitem__, coming)))
        return OnDisk(hashes, awaited, frozenset(chain(hashes, coming)), num_blocks)

    @property
    def _has_nothing(self) -> bool:
        index = self.index
        return index is None or not (len(index) or index.num_others or self._reads)

    def begin_read(self, hashes: Items[BlockHash]) -> DiskRead:
        """Begin to read blocks that `find` or `find_blocks` has returned."""
        assert self.index is not None, "there is no disk"
        folders: list[str] = []
        for block_hash in hashes:
            folder = self.index.find(block_hash)
            assert folder is not None, "it is on no disk"
            self.index.use(block_hash)
            folders.append(folder)
        read = DiskRead(self._host_pool.allocate(len(hashes)), list(hashes), folders)
        self._reads.append(read)
        self._coming.update(dict.fromkeys(hashes, read))
        return read

    def end_read(self, read: DiskRead, result: DiskResult) -> None:
        """Make what was read, whole and verified, findable in host memory; free the rest."""
        assert self.index is not None, "there is no disk"
        self._reads.remove(read)
        for block_hash in read.hashes:
            del self._coming[block_hash]
        num_done, failure = result.num_done, result.failure
        self._host_pool.release(read.host_block_ids[num_done:])
        # The first of a prefix is evicted last.
        self._host_pool.keep(read.host_block_ids[:num_done][::-1], read.hashes[:num_done][::-1])
        self.count(DiskEvent.READ, num_done)
        if failure is None:
            return
        self.count(
            {
                DiskFailure.VANISHED: DiskEvent.VANISHED,
                DiskFailure.CORRUPT: DiskEvent.CORRUPT,
                DiskFailure.ERROR: DiskEvent.READ_FAILED,
            }[failure]
        )
        if failure is not DiskFailure.ERROR:
            self.index.forget(read.hashes[num_done], read.folders[num_done])

    # --- what is there ------------------------------------------------------------------------

    def end_look(self, result: DiskResult, *, is_all: bool) -> None:
        """Apply a listing of the folders.

        Files may be written if this node's folder could be seen, and until a look finds that it is
        this node's no more.
        """
        assert self.index is not None, "there is no disk"
        self.index.take_others(result.scan.others)
        if result.failure is not None:
            self.count(DiskEvent.WRITE_FAILED)
        if is_all and result.failure is None:
            self.index.take_own(result.scan)
            self.may_write = True
        elif result.failure is not None and not is_all:
            self.index.take_own(DiskScan())
            self.may_write = False

    def check(self) -> None:
        """Raise `AssertionError` if what is being read can be found, or what is written is lost."""
        if self.index is not None:
            self.index.check()
        for read in self._reads:
            for block_hash in read.hashes:
                assert self._coming[block_hash] is read, "two reads of a block"
        assert len(self._coming) == self.num_read_into, "reads miscounted"
        if self._write is not None:
            for one, block_hash in zip(self._write.host_block_ids, self._write.hashes, strict=True):
                assert self._host_pool.find(block_hash) == one, "evicted while it is written"
