"""Log lines for a reader that stands still, is gone, or is slow."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from common.observing import log_output
from common.observing.log_output import MAX_WAITING_BYTES, LogOutput

LINE = "x" * 1000


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """The two ends of a pipe: from which is read, and to which is written."""
    reading, writing = os.pipe()
    yield reading, writing
    for end in (reading, writing):
        with suppress(OSError):
            os.close(end)


def logger_to(descriptor: int) -> logging.Logger:
    log = logging.Logger("test")
    log.addHandler(LogOutput(descriptor))
    return log


def read_until(descriptor: int, found: str) -> str:
    read = ""
    while not re.search(found, read):
        read += os.read(descriptor, 1 << 16).decode()
    return read


@pytest.mark.covers("M05")
def test_a_reader_that_stands_still_holds_nothing_up(ends: tuple[int, int]) -> None:
    log = logger_to(ends[1])
    num_lines = 2 * MAX_WAITING_BYTES // len(LINE)
    for number in range(num_lines):
        log.warning("%d %s", number, LINE)
    read = read_until(ends[0], r"\d+ log lines are missing")
    (lost,) = re.findall(r"^(\d+) log lines are missing here", read, re.MULTILINE)
    numbers = [int(one) for one in re.findall(rf"^(\d+) {LINE}$", read, re.MULTILINE)]
    assert numbers == list(range(len(numbers))), "the first ones, in order and whole"
    assert len(numbers) + int(lost) == num_lines
    assert int(lost) > 0
    log.warning("behind")
    assert read_until(ends[0], "behind\n").endswith("behind\n"), "and it goes on"


@pytest.mark.covers("M05")
def test_the_end_of_a_process_waits_for_a_reader_and_not_for_one_that_stands_still(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "FLUSH_S", 60.0)
    output = LogOutput(ends[1])
    log = logging.Logger("test")
    log.addHandler(output)
    log.warning("the last words")
    output.flush()
    os.set_blocking(ends[0], False)
    assert os.read(ends[0], 1 << 16) == b"the last words\n"
    monkeypatch.setattr(log_output, "FLUSH_S", 0.01)
    for _ in range(200):
        log.warning(LINE)
    output.flush()


def test_without_a_reader_lines_are_lost_and_nothing_else(ends: tuple[int, int]) -> None:
    output = LogOutput(ends[1])
    log = logging.Logger("test")
    log.addHandler(output)
    os.close(ends[0])
    for _ in range(3):
        log.warning("nobody")
        output.flush()


def test_a_pipe_that_does_not_wait_is_waited_for(ends: tuple[int, int]) -> None:
    """A terminal or pipe that another process has made non-blocking gets whole lines."""
    os.set_blocking(ends[1], False)
    log = logger_to(ends[1])
    for _ in range(200):
        log.warning(LINE)
    log.warning("last")
    lines = read_until(ends[0], "last\n").splitlines()
    assert lines == [LINE] * 200 + ["last"]


def test_a_file_has_each_line_at_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        log = logger_to(file.fileno())
        log.warning("a\ud800")
        assert (tmp_path / "log").read_bytes() == b"a\\ud800\n"


_ROLE = """
import logging
from common.observing.logs import set_up_logs

set_up_logs("info", "human", role="router", node_id="r")
for _ in range(5000):
    logging.getLogger("pdserve").info("x" * 1000)
print("done", flush=True)
"""


@pytest.mark.covers("M05")
def test_a_role_whose_log_nobody_reads_goes_on_and_ends(ends: tuple[int, int]) -> None:
    command = [sys.executable, "-c", _ROLE]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=ends[1], timeout=120, check=True)
    assert run.stdout == b"done\n"
