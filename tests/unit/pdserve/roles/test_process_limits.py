"""A process that may have no more threads or memory says so."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading

import pytest

from common.errors import ConfigError
from pdserve.roles.process_limits import (
    THREADS,
    out_of_memory,
    require_threads,
    warn_of_little_address_space,
)
from tests.support.cluster.processes import SOURCES

GIB = 1 << 30


def limited(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let the process begin `most` threads."""
    begin, left = threading.Thread.start, iter(range(most))

    def start(self: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        begin(self)

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("most", [0, 5, THREADS])
def test_too_few_threads_are_told_with_their_number(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    before = threading.active_count()
    limited(monkeypatch, most)
    with pytest.raises(ConfigError, match=rf"begin {most} threads: wanted \d+ .*pids\.max"):
        require_threads()
    assert threading.active_count() == before


def test_as_many_threads_as_are_wanted_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    limited(monkeypatch, THREADS + 2)
    require_threads()
    assert threading.active_count() == before


def test_what_limits_the_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = MemoryError("Unable to allocate 3.25 GiB")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert out_of_memory(wanted).startswith("Unable to allocate 3.25 GiB: more memory was wanted")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GIB, GIB))
    assert "1.00 GiB of addresses (ulimit -v)" in out_of_memory(wanted)
    assert out_of_memory(MemoryError()).startswith("an allocation failed")


@pytest.mark.parametrize(("soft", "words"), [(GIB, "1.00 GiB of addresses"), (-1, "")])
def test_a_limit_of_addresses_is_told_before_a_library_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, soft: int, words: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    warn_of_little_address_space()
    assert words in caplog.text if words else not caplog.text


def test_a_command_without_memory_ends_with_a_sentence() -> None:
    code = """
import resource
import sys
from pdserve import cli
from pdserve.roles import run_role
def starve(config):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return bytearray(1 << 31)
run_role.run_role = starve
sys.exit(cli.main(["serve", "--role", "router", "--model", "demo"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SOURCES), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "pdserve: an allocation failed: more memory was wanted than the limit of 1.00 GiB of "
        "addresses (ulimit -v) leaves\n"
    )
