"""Roles that end while a test sends them a signal: a template waits for its forks by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.forked_serve import ForkedServe
from tests.support.cluster.processes import SOURCES


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ForkedServe]:
    """A role that its template has waited for, and has not yet said so: it seems to run."""
    monkeypatch.setattr(ForkedServe, "_start", lambda *_: None)
    monkeypatch.setattr(ForkedServe, "poll", lambda _: None)
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as process:
        process.wait()
        monkeypatch.setattr(ForkedServe, "pid", process.pid)
        yield ForkedServe(["--role", "router"], tmp_path / "log", {}, SOURCES)


def test_a_signal_to_a_role_that_has_just_ended_is_none(ended: ForkedServe) -> None:
    ended.send_signal(signal.SIGTERM)
    ended.kill()


def test_a_signal_reaches_a_role_that_runs(
    ended: ForkedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        monkeypatch.setattr(ForkedServe, "pid", process.pid)
        ended.kill()
        assert process.wait() == -signal.SIGKILL
