"""What a soak says of what processes hold, also of one that ends while it is read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.soak.report import MORE_DESCRIPTORS, MORE_MIB, Held, held, more_held


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until its input ends."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # one that has only begun holds next to nothing
        yield process
        process.kill()


def test_a_process_that_runs_holds_something(child: subprocess.Popen[bytes]) -> None:
    found = held(child.pid)
    assert found is not None
    assert found.num_descriptors >= 3
    assert 1.0 < found.resident_mib < 1024.0


@pytest.mark.parametrize("method", ["read_text", "iterdir"])
def test_a_process_that_ends_while_it_is_read_holds_nothing(
    method: str, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(Path, method)

    def end_and_read(path: Path) -> object:
        child.kill()
        child.wait()
        return real(path)

    monkeypatch.setattr(Path, method, end_and_read)
    assert held(child.pid) is None


def test_a_process_that_nobody_has_waited_for_holds_nothing(
    child: subprocess.Popen[bytes],
) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert held(child.pid) is None


def test_only_much_more_than_at_the_start_is_wrong() -> None:
    at_start = {"router-0": Held(10, 100.0), "decode-0": Held(10, 100.0)}
    within = Held(10 + MORE_DESCRIPTORS, 100.0 + MORE_MIB)
    assert more_held(at_start, {"router-0": within, "decode-0": Held(2, 1.0)}) == []
    more = Held(11 + MORE_DESCRIPTORS, 101.0 + MORE_MIB)
    assert more_held(at_start, {"router-0": more, "decode-0": within}) == [
        "router-0 has 51 descriptors, and had 10",
        "router-0 has 197 MiB, and had 100",
    ]


def test_a_process_that_ended_is_named() -> None:
    at_start = {"router-0": Held(10, 100.0), "decode-0": Held(10, 100.0)}
    at_end = {"router-0": Held(10, 100.0), "prefill-0": Held(10, 100.0)}
    assert more_held(at_start, at_end) == ["decode-0 has ended"]
