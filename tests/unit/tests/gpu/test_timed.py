"""Phases with time limits: whatever one of them does, the end says what was found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu import timed
from tests.gpu.timed import OutOfTime, Phases, as_json, limited

SOURCES = Path(__file__).parents[4]


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed of each phase, without its time, and the two last lines."""
    lines = capsys.readouterr().out.splitlines()
    begun = [line.partition(" (")[0] for line in lines[:-2] if line.startswith("== ")]
    return [*begun, *lines[-2:]]


def test_a_phase_that_takes_too_long_ends_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    found: dict[str, Any] = {"before": 1}
    phases = Phases(0.1, found, out)
    assert not phases.run("slow", 0.05, lambda: time.sleep(60))
    assert not phases.run("late", 60, lambda: time.sleep(60))
    assert json.loads(out.read_text()) == {"before": 1, "failed": ["slow", "late"]}
    assert phases.run("closing", 60, lambda: {"found": 1}, is_closing=True)
    assert (phases.passed, phases.failed) == (1, ["slow", "late"])
    assert phases.end() == 2
    told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"== closing: ok \([0-9.]+ s\) {'found': 1}", told[-3])
    assert told[-2:] == ['{"before": 1}', "1 passed, 2 failed: slow, late"]
    with pytest.raises(OutOfTime, match="not within 0 s"), limited(0.01):
        time.sleep(60)


def test_an_alarm_that_was_taken_for_another_error_rings_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timed, "AGAIN_S", 0.01)

    def as_an_event_loop() -> None:
        try:
            time.sleep(60)
        except OutOfTime:
            time.sleep(60)

    with pytest.raises(OutOfTime), limited(0.01):
        as_an_event_loop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_an_interruption_only_what_closes_is_run(
    capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    phases = Phases(60, {"before": 1})

    def interrupted() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    with phases.interruptible():
        assert not phases.run("one", 60, interrupted)
        assert not phases.run("two", 60, lambda: pytest.fail("it is run"))
        closing = lambda: os.kill(os.getpid(), number)  # noqa: E731
        assert phases.run("closing", 60, closing, is_closing=True)
        assert phases.end() == 2
    assert lines_of(capsys) == [
        "== one: FAILED", "== two: FAILED: interrupted before it began", "== closing: ok",
        '{"before": 1}', "1 passed, 2 failed: one, two",
    ]  # fmt: skip


def test_an_interruption_between_two_phases_is_one_of_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    phases = Phases(60, {})
    with phases.interruptible():
        assert phases.run("one", 60, lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not phases.run("two", 60, lambda: pytest.fail("it is run"))
        assert phases.end() == 1
    assert lines_of(capsys)[-1] == "1 passed, 1 failed: two"


def test_a_phase_may_even_end_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(60, {})
    assert not phases.run("one", 60, lambda: sys.exit(3))
    assert phases.run("two", 60, lambda: None)
    assert phases.end() == 1
    assert lines_of(capsys)[-1] == "1 passed, 1 failed: one"


def test_what_cannot_be_written_into_a_file_is_shown_all_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    phases = Phases(60, {"a": 1}, tmp_path / "no such folder" / "found.json")
    assert phases.run("one", 60, lambda: None)
    assert phases.end() == 0
    assert lines_of(capsys) == ["== one: ok", '{"a": 1}', "1 passed, 0 failed"]


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ({"a": np.float32(0.5), "b": np.array([3])}, {"a": 0.5, "b": 3}),
        ({"a": Path("x"), "b": np.arange(2)}, {"a": "x", "b": "[0 1]"}),
        ({"a": {(1, 2): 3}, "b": 4}, {"a": "{(1, 2): 3}", "b": "4"}),
    ],
)
def test_what_is_found_is_shown_though_json_does_not_know_it(
    found: dict[str, Any], shown: dict[str, Any]
) -> None:
    assert json.loads(as_json(found)) == shown


STUCK = """
import signal, time
from tests.gpu.timed import Phases

def stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)

phases = Phases(60, {"before": 1}, grace_s=0.1)
phases.run("one", 60, lambda: None)
phases.run("two", 0.1, stuck)
print("it goes on")
"""


def test_where_no_signal_reaches_a_phase_the_program_ends_with_its_last_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], cwd=SOURCES, capture_output=True, text=True, check=False
    )
    assert done.returncode == 100, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == ['{"before": 1}', "1 passed, 1 failed: two"]
    assert "in stuck" in done.stdout
    assert "it goes on" not in lines
