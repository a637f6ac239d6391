"""Real child processes: how they are stopped, and what is known of them afterwards."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.observing.clock import MonotonicClock
from pdserve.local_cluster.child_process import (
    ChildProcess,
    NotStarted,
    described_exit,
    start_child,
    stop_children,
)
from pdserve.local_cluster.signals import Signals, StopRequested
from tests.support.clocks.manual_clock import ManualClock
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.processes import is_alive

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
FOREVER = "print('runs', flush=True); signal.pause()"


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as signals:
        yield signals


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[ChildProcess]]:
    started: list[ChildProcess] = []
    yield started
    for child in started:
        child.kill()


def start(folder: Path, children: list[ChildProcess], signals: Signals, code: str) -> ChildProcess:
    """A Python process that has printed its first line."""
    name = f"child-{len(children)}"
    child = start_child(name, [sys.executable, "-c", code], folder / f"{name}.log", os.environ)
    children.append(child)
    while not child.log_tail(1) and child.exit_code() is None:
        signals.wait(0.01)
    return child


def test_a_system_without_room_for_a_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(NotStarted, match=r"^redis cannot be started: Resource .*ulimit -u"):
        start_child("redis", ["redis-server"], tmp_path / "redis.log", os.environ)


def test_a_child_that_stops_is_not_killed(
    tmp_path: Path, signals: Signals, children: list[ChildProcess]
) -> None:
    child = start(tmp_path, children, signals, f"import signal; {FOREVER}")
    killed = stop_children(children, signals, MonotonicClock(), num_patient_stops=0, timeout_s=60.0)
    assert killed == []
    assert child.exit_code() == -signal.SIGTERM


def test_a_child_that_does_not_stop_is_killed_when_time_is_up(
    tmp_path: Path, signals: Signals, children: list[ChildProcess]
) -> None:
    child = start(tmp_path, children, signals, f"{STUBBORN}; {FOREVER}")
    killed = stop_children(children, signals, MonotonicClock(), num_patient_stops=0, timeout_s=0.05)
    assert killed == ["child-0"]
    assert child.exit_code() == -signal.SIGKILL


def test_one_more_stop_signal_ends_the_patience(
    tmp_path: Path, signals: Signals, children: list[ChildProcess]
) -> None:
    child = start(tmp_path, children, signals, f"{STUBBORN}; {FOREVER}")
    signal.raise_signal(signal.SIGINT)
    # On this clock the time is never up.
    killed = stop_children(children, signals, ManualClock(), num_patient_stops=0, timeout_s=3600.0)
    assert killed == ["child-0"]
    assert child.exit_code() == -signal.SIGKILL


def test_the_log_tail_is_bounded(
    tmp_path: Path, signals: Signals, children: list[ChildProcess]
) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'\xff' + b'x' * 100_000 + b'\nlast\xff\n')"
    child = start(tmp_path, children, signals, code)
    while child.exit_code() is None:
        signals.wait(0.01)
    first, last = child.log_tail(5)
    assert len(first) < 20_000
    assert last == "last\N{REPLACEMENT CHARACTER}"
    assert child.log_tail(1) == [last]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_an_exit_in_words(code: int, words: str) -> None:
    assert described_exit(code) == words


def test_a_stop_signal_is_counted_and_wakes_the_waiting_task(signals: Signals) -> None:
    assert signals.num_stops == 0
    signal.raise_signal(signal.SIGTERM)
    signals.wait(60.0)
    assert signals.num_stops == 1


def test_a_stop_signal_ends_a_blocking_call(signals: Signals) -> None:
    with pytest.raises(StopRequested), signals.raising():
        signal.raise_signal(signal.SIGINT)
    # Also when it came before.
    with pytest.raises(StopRequested), signals.raising():
        pytest.fail("it was asked to stop already")


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    with Signals():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before


def test_a_command_that_cannot_be_started_says_so(
    tmp_path: Path, signals: Signals, children: list[ChildProcess]
) -> None:
    child = start_child("nothing", [str(tmp_path / "missing")], tmp_path / "log", os.environ)
    children.append(child)
    while child.exit_code() is None:
        signals.wait(0.01)
    assert child.exit_code() == 127
    assert child.log_tail(1) == [f"cannot start {tmp_path}/missing: No such file or directory"]


def test_no_handler_of_a_library_runs_in_a_child(
    tmp_path: Path, signals: Signals, children: list[ChildProcess]
) -> None:
    """Handlers of gRPC, which run in a forked child, end it at its birth."""
    marker, log = tmp_path / "handler ran", tmp_path / "inner"
    program = f"""
import os, sys
from pathlib import Path
from pdserve.local_cluster.child_process import start_child
os.register_at_fork(before=Path({str(marker)!r}).touch)
child = start_child("inner", [sys.executable, "-c", "pass"], Path({str(log)!r}), os.environ)
print("started", flush=True)
"""
    child = start(tmp_path, children, signals, program)
    assert child.log_tail(1) == ["started"]
    assert not marker.exists()


def test_a_child_ends_with_its_parent(
    tmp_path: Path, signals: Signals, children: list[ChildProcess]
) -> None:
    log = tmp_path / "inner"
    program = f"""
import os, signal, sys
from pathlib import Path
from pdserve.local_cluster.child_process import start_child
command = [sys.executable, "-c", {f"import signal; {FOREVER}"!r}]
print(start_child("inner", command, Path({str(log)!r}), os.environ).pid, flush=True)
signal.pause()
"""
    parent = start(tmp_path, children, signals, program)
    pid = int(parent.log_tail(1)[0])
    while not log.read_bytes():  # it runs
        signals.wait(0.01)
    parent.kill()
    wait_until(lambda: not is_alive(pid), "the child has ended")
