"""One thread that looks at and writes files of blocks, and one that reads them."""

from __future__ import annotations

import logging
from queue import SimpleQueue
from threading import Lock, Thread

from engine.core.blocks.disk_jobs import (
    DiskFailure,
    DiskJob,
    DiskLook,
    DiskRead,
    DiskResult,
    DiskWrite,
    OnResult,
)
from engine.prefix_disk.block_folder import BlockFolder

log = logging.getLogger("pdserve.engine")

_Queue = SimpleQueue[tuple[DiskJob, OnResult] | None]


class DiskThreads:
    """Does jobs in the order in which they begin: those that read, and beside them all others.

    The threads are daemons: a disk that hangs must not keep the process from ending. What is cut
    off then is no file yet.
    """

    def __init__(self, folder: BlockFolder) -> None:
        self._folder = folder
        self._writing: _Queue = SimpleQueue()
        self._reading: _Queue = SimpleQueue()
        self._failing: set[str] = set()
        self._lock = Lock()
        self._threads = [
            Thread(target=self._run, args=[jobs], name=name, daemon=True)
            for name, jobs in (
                ("pdserve-disk-writes", self._writing),
                ("pdserve-disk-reads", self._reading),
            )
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, job: DiskJob, on_result: OnResult) -> None:
        """Begin a job without waiting; `on_result` is called on another thread at its end."""
        (self._reading if isinstance(job, DiskRead) else self._writing).put((job, on_result))

    def close(self, timeout_s: float) -> None:
        """End when what was begun is done, or after `timeout_s`."""
        self._writing.put(None)
        self._reading.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            self._folder.close()

    def _run(self, jobs: _Queue) -> None:
        while (task := jobs.get()) is not None:
            job, on_result = task
            result = do_job(self._folder, job)
            self._warn_once("read" if isinstance(job, DiskRead) else "written", result)
            on_result(result)

    def _warn_once(self, what: str, result: DiskResult) -> None:
        """Log a failure unless the one before was not mended since."""
        is_bad = result.failure is not None and result.failure is not DiskFailure.VANISHED
        with self._lock:
            is_news = is_bad != (what in self._failing)
            (self._failing.add if is_bad else self._failing.discard)(what)
        if is_news and is_bad:
            log.warning(
                "prefixes on disk cannot be %s, and are computed instead: %s", what, result.why
            )
        elif is_news:
            log.info("prefixes on disk can be %s again", what)


def do_job(folder: BlockFolder, job: DiskJob) -> DiskResult:
    """Do a job now. An unexpected error counts as one of the disk, and fails this job only."""
    try:
        match job:
            case DiskLook():
                return folder.look(job)
            case DiskWrite():
                return folder.write(job)
            case DiskRead():
                return folder.read(job)
    except Exception as error:
        log.exception("prefixes on disk")
        return DiskResult(failure=DiskFailure.ERROR, why=repr(error))
