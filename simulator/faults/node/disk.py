"""Files of prefixes: they outlive the process, jobs take time, and the disk may be faulty.

A job writes from host memory, and reads into it, at its end: until then the blocks that it reads
into hold no valid numbers. All nodes have their folders on one disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from common.kv.blocks import BlockHash
from engine.core.blocks.disk_jobs import (
    OWN_FOLDER,
    DiskFailure,
    DiskJob,
    DiskLook,
    DiskRead,
    DiskResult,
    DiskScan,
    DiskWrite,
    OnResult,
)
from simulator.faults.contents import KVMemory, Numbers
from simulator.faults.hosts import ProcessClock

BLOCK_S = 2e-3
TIMES_SLOW = 100
SLOW, ERROR, CORRUPT = "slow", "error", "corrupt"


Files = dict[BlockHash, Numbers]
"""Blocks in every layer, by their hashes."""


class Disk:
    """All files, in folders by the names of the nodes and by revision."""

    def __init__(self) -> None:
        self.revisions: dict[int, dict[str, Files]] = {}
        self.trouble: dict[str, str] = {}
        """The fault of each node's disk now."""

    def files(self) -> Iterator[tuple[BlockHash, Numbers]]:
        """Yield all files."""
        for folders in self.revisions.values():
            for files in folders.values():
                yield from files.items()


class NodeDisk:
    """The `BlockDisk` of the node `name` in one life, which is of one revision."""

    def __init__(
        self, disk: Disk, name: str, revision: int, clock: ProcessClock, memory: KVMemory
    ) -> None:
        self._disk, self._name = disk, name
        self._clock, self._memory = clock, memory
        self._folders = disk.revisions.setdefault(revision, {})
        self._own = self._folders.setdefault(name, {})

    def begin(self, job: DiskJob, on_result: OnResult) -> None:
        """Begin a job; `on_result` is called with its end."""
        num_blocks = 1 if isinstance(job, DiskLook) else len(job.hashes)
        if isinstance(job, DiskRead):
            self._memory.spoil_host(job.host_block_ids)
        is_slow = self._disk.trouble.get(self._name) == SLOW
        span_s = BLOCK_S * num_blocks * (TIMES_SLOW if is_slow else 1)
        self._clock.after(span_s, partial(self._end, job, on_result))

    def _end(self, job: DiskJob, on_result: OnResult) -> None:
        match job:
            case _ if self._disk.trouble.get(self._name) == ERROR:
                on_result(DiskResult(failure=DiskFailure.ERROR, why="input/output error"))
            case DiskWrite():
                on_result(self._write(job))
            case DiskRead():
                on_result(self._read(job))
            case DiskLook():
                on_result(DiskResult(scan=self._look()))

    def _write(self, job: DiskWrite) -> DiskResult:
        for name in job.removed:
            assert isinstance(name, bytes), "nobody else writes here"
            self._own.pop(name, None)
        for host_block, block_hash in zip(job.host_block_ids, job.hashes, strict=True):
            self._own[block_hash] = self._memory.of_host_block(host_block)
        return DiskResult(num_done=len(job.hashes))

    def _read(self, job: DiskRead) -> DiskResult:
        blocks = zip(job.host_block_ids, job.hashes, job.folders, strict=True)
        for num_done, (host_block, block_hash, folder) in enumerate(blocks):
            files = self._own if folder == OWN_FOLDER else self._folders[folder]
            if block_hash not in files:
                return DiskResult(num_done=num_done, failure=DiskFailure.VANISHED)
            if self._disk.trouble.get(self._name) == CORRUPT:
                del files[block_hash]
                return DiskResult(num_done=num_done, failure=DiskFailure.CORRUPT)
            self._memory.put_host(host_block, files[block_hash])
        return DiskResult(num_done=len(job.hashes))

    def _look(self) -> DiskScan:
        others = {
            block_hash: name
            for name, files in self._folders.items()
            if name != self._name
            for block_hash in files
        }
        return DiskScan(own=tuple(self._own), others=others)
