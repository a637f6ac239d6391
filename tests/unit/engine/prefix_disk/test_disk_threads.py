"""Jobs on threads: in order, beside each other, with one warning, whatever goes wrong."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event, current_thread

import numpy as np
import pytest

from engine.core.blocks.disk_jobs import (
    DiskFailure,
    DiskJob,
    DiskLook,
    DiskRead,
    DiskResult,
    DiskWrite,
)
from engine.prefix_disk.block_folder import BlockFolder
from engine.prefix_disk.disk_threads import DiskThreads
from tests.support.disk.faulty_files import FaultyCalls

HASH = b"h" * 16
WRITE, READ = DiskWrite([0], [HASH], []), DiskRead([1], [HASH], [""])
WAIT_S = 60.0


class Disk:
    def __init__(self, path: Path) -> None:
        self.memory = np.arange(400, dtype=np.uint16).view(np.uint8).reshape(2, 2, 2, 100)
        self.calls = FaultyCalls()
        self.threads = DiskThreads(BlockFolder(path / "d", "f", self.memory, self.calls))
        self.results: SimpleQueue[DiskResult] = SimpleQueue()

    def do(self, job: DiskJob) -> DiskResult:
        self.threads.begin(job, self.results.put)
        return self.results.get(timeout=WAIT_S)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.threads.close(WAIT_S)


def test_jobs_are_done(disk: Disk) -> None:
    assert disk.do(DiskLook(is_all=True)).failure is None
    assert disk.do(WRITE) == DiskResult(1)
    assert disk.do(READ) == DiskResult(1)
    assert np.array_equal(disk.memory[:, :, 0], disk.memory[:, :, 1])


def test_no_file_is_touched_on_the_thread_that_begins_a_job(disk: Disk) -> None:
    """The threads are the only way to the folder: steps run on the thread that begins jobs."""
    touched: dict[str, set[str]] = {}

    def note(name: str) -> None:
        touched.setdefault(current_thread().name, set()).add(name)

    disk.calls.fault = note
    for job in (DiskLook(is_all=True), WRITE, READ, DiskWrite([], [], [HASH])):
        assert disk.do(job).failure is None
    assert touched.keys() == {"pdserve-disk-writes", "pdserve-disk-reads"}
    assert {"open_new", "remove"} <= touched["pdserve-disk-writes"]
    assert "read" in touched["pdserve-disk-reads"]


def test_a_write_that_hangs_holds_up_no_read_and_nobody_who_begins_one(disk: Disk) -> None:
    disk.do(DiskLook(is_all=True))
    disk.do(WRITE)
    hangs, ends = Event(), Event()

    def hang(name: str) -> int | None:
        if name == "sync":
            hangs.set()
            ends.wait(WAIT_S)
        return None

    disk.calls.fault = hang
    written: SimpleQueue[DiskResult] = SimpleQueue()
    disk.threads.begin(WRITE, written.put)
    assert hangs.wait(WAIT_S)
    assert disk.do(READ) == DiskResult(1)
    assert written.empty()
    ends.set()
    assert written.get(timeout=WAIT_S) == DiskResult(1)


def test_a_failure_is_told_once_until_it_works_again(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.engine")
    disk.do(DiskLook(is_all=True))
    for _ in range(2):
        disk.calls.fault = lambda name: errno.ENOSPC if name == "write" else None
        for _ in range(3):
            assert disk.do(WRITE).failure is DiskFailure.ERROR
        disk.calls.fault = lambda name: None
        disk.do(WRITE)
    told = [record.message for record in caplog.records]
    assert len(told) == 4
    assert told[0] == (
        "prefixes on disk cannot be written, and are computed instead: "
        "[Errno 28] No space left on device"
    )
    assert told[1] == "prefixes on disk can be written again"


def test_a_file_that_is_gone_is_no_failure_of_the_disk(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.do(DiskLook(is_all=True))
    assert disk.do(READ).failure is DiskFailure.VANISHED
    assert not caplog.records


def test_an_error_that_nobody_expected_ends_the_job_and_not_the_thread(disk: Disk) -> None:
    disk.do(DiskLook(is_all=True))
    disk.calls.fault = lambda name: 1 // 0
    assert disk.do(WRITE).failure is DiskFailure.ERROR
    disk.calls.fault = lambda name: None
    assert disk.do(WRITE) == DiskResult(1)


def test_a_closed_disk_is_free_for_the_next_process(tmp_path: Path) -> None:
    first, second = Disk(tmp_path), Disk(tmp_path)
    first.do(DiskLook(is_all=True))
    first.do(WRITE)
    first.threads.close(WAIT_S)
    assert second.do(DiskLook(is_all=True)).scan.own == (HASH,)
    second.threads.close(WAIT_S)
