"""A disk whose jobs are done when a test says so, on its own thread."""

from __future__ import annotations

from engine.core.blocks.disk_jobs import DiskJob, DiskRead, OnResult
from engine.prefix_disk.block_folder import BlockFolder
from engine.prefix_disk.disk_threads import do_job


class PlayedDisk:
    """Does a job in each turn, after `num_polls` turns without; none while it `is_stuck`.

    Jobs that read and all others are two queues, as `DiskThreads` has them.
    """

    def __init__(self, folder: BlockFolder) -> None:
        self.folder = folder
        self.num_polls = 0
        self.is_stuck = False
        self.done: list[DiskJob] = []
        self._jobs: tuple[list[tuple[DiskJob, OnResult]], ...] = ([], [])
        self._num_polled = 0

    @property
    def is_busy(self) -> bool:
        """Whether turns will do more."""
        return any(self._jobs) and not self.is_stuck

    def begin(self, job: DiskJob, on_result: OnResult) -> None:
        """Queue a job."""
        self._jobs[isinstance(job, DiskRead)].append((job, on_result))

    def turn(self) -> None:
        """Do a job of each kind, if it is time."""
        if not self.is_busy:
            return
        self._num_polled += 1
        if self._num_polled <= self.num_polls:
            return
        self._num_polled = 0
        for jobs in self._jobs:
            if jobs:
                job, on_result = jobs.pop(0)
                self.done.append(job)
                on_result(do_job(self.folder, job))
