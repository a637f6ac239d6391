"""Log lines for a reader that stands still, is gone, or is slow."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.observing import log_output
from common.observing.log_output import MAX_WAITING_BYTES, LogOutput

LINE = "x" * 1000


class Pipe:
    """A pipe that log lines are written to."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self._outputs: list[LogOutput] = []

    def output(self) -> LogOutput:
        output = LogOutput(self.writing)
        self._outputs.append(output)
        return output

    def logger(self) -> logging.Logger:
        log = logging.Logger("test")
        log.addHandler(self.output())
        return log

    def close_reading(self) -> None:
        if self.reading >= 0:
            os.close(self.reading)
        self.reading = -1

    def close(self) -> None:
        """Close it when no thread writes any more: a file opened later may get the same number."""
        self.close_reading()  # so what waits to be written is lost at once
        for output in self._outputs:
            output.flush()
        os.close(self.writing)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_output, "FLUSH_S", 60.0)
        pipe.close()


def read_until(descriptor: int, found: str) -> str:
    read = ""
    while not re.search(found, read):
        read += os.read(descriptor, 1 << 16).decode()
    return read


@pytest.mark.covers("M05")
def test_a_reader_that_stands_still_holds_nothing_up(pipe: Pipe) -> None:
    log = pipe.logger()
    num_lines = 2 * MAX_WAITING_BYTES // len(LINE)
    for number in range(num_lines):
        log.warning("%d %s", number, LINE)
    read = read_until(pipe.reading, r"\d+ log lines are missing")
    (lost,) = re.findall(r"^(\d+) log lines are missing here", read, re.MULTILINE)
    numbers = [int(one) for one in re.findall(rf"^(\d+) {LINE}$", read, re.MULTILINE)]
    assert numbers == list(range(len(numbers))), "the first ones, in order and whole"
    assert len(numbers) + int(lost) == num_lines
    assert int(lost) > 0
    log.warning("behind")
    assert read_until(pipe.reading, "behind\n").endswith("behind\n"), "and it goes on"


@pytest.mark.covers("M05")
def test_the_end_of_a_process_waits_for_a_reader_and_not_for_one_that_stands_still(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "FLUSH_S", 60.0)
    output = pipe.output()
    log = logging.Logger("test")
    log.addHandler(output)
    log.warning("the last words")
    output.flush()
    os.set_blocking(pipe.reading, False)
    assert os.read(pipe.reading, 1 << 16) == b"the last words\n"
    monkeypatch.setattr(log_output, "FLUSH_S", 0.01)
    for _ in range(200):
        log.warning(LINE)
    output.flush()


def test_without_a_reader_lines_are_lost_and_nothing_else(pipe: Pipe) -> None:
    output = pipe.output()
    log = logging.Logger("test")
    log.addHandler(output)
    pipe.close_reading()
    for _ in range(3):
        log.warning("nobody")
        output.flush()


def test_a_pipe_that_does_not_wait_is_waited_for(pipe: Pipe) -> None:
    """A terminal or pipe that another process has made non-blocking gets whole lines."""
    os.set_blocking(pipe.writing, False)
    log = pipe.logger()
    for _ in range(200):
        log.warning(LINE)
    log.warning("last")
    lines = read_until(pipe.reading, "last\n").splitlines()
    assert lines == [LINE] * 200 + ["last"]


def test_a_file_has_each_line_at_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        log = logging.Logger("test")
        log.addHandler(LogOutput(file.fileno()))
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
def test_a_role_whose_log_nobody_reads_goes_on_and_ends(pipe: Pipe) -> None:
    command = [sys.executable, "-c", _ROLE]
    run = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=pipe.writing, timeout=120, check=True
    )
    assert run.stdout == b"done\n"
