"""What a process tells the first one of a run of its tests, and that nothing printed is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.told_reports import MOST_DELAY_S, SHOWN_S, Teller, is_plain, is_shown
from tests.unit.tests.support.written_runs import notes, run

TOLD = """
import os
from noted import note
IS_FIRST = "PYTEST_XDIST_WORKER" not in os.environ
def pytest_runtest_logstart():
    if IS_FIRST:
        note("told of a start")
def pytest_runtest_logreport(report):
    if IS_FIRST:
        is_long = report.duration >= 0.02
        note(f"told {report.when} {report.nodeid} {report.location} {is_long}")
"""
TESTS = """
import time, pytest
@pytest.fixture
def slow():
    time.sleep(0.02)
def test_slow(slow):
    pass
class TestOne:
    def test_brief(self):
        pass
def test_printing():
    print("printed")
def test_failing():
    assert not "a failure"
@pytest.mark.xfail(strict=False)
def test_better():
    pass
@pytest.mark.xfail
def test_known():
    assert 0
def test_skipped():
    pytest.skip("no")
@pytest.fixture
def broken():
    yield
    assert not "an end"
def test_broken_end(broken):
    pass
"""
COUNTS = "1 failed, 4 passed, 1 skipped, 1 xfailed, 1 xpassed, 1 error in"


def test_all_that_is_printed_is_told_and_no_start(tmp_path: Path) -> None:
    ran = run({"conftest.py": TOLD, "tests/test_a.py": TESTS}, tmp_path, num_processes=2)
    assert COUNTS in ran.stdout, ran.stdout + ran.stderr
    assert "assert not 'a failure'" in ran.stdout
    assert "assert not 'an end'" in ran.stdout
    told = notes(tmp_path)
    a = "tests/test_a.py"
    assert f"told setup {a}::test_slow ('{a}', None, 'test_slow') True" in told
    brief = f"told call {a}::TestOne::test_brief ('{a}', None, 'TestOne.test_brief')"
    assert sum(what.startswith(brief) for what in told) == 1
    assert "told of a start" not in told


@pytest.fixture
def sent() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a `Teller` reads."""
    now_s = [100.0]
    monkeypatch.setattr("tests.support.told_reports.time.monotonic", lambda: now_s[0])
    return now_s


def report(**fields: Any) -> pytest.TestReport:
    usual: dict[str, Any] = {"outcome": "passed", "longrepr": None, "when": "call", "duration": 0.0}
    return pytest.TestReport("a", ("a", 0, "a"), {}, **(usual | fields))


def test_what_passes_is_told_together_before_the_next_event_or_after_a_while(
    sent: list[tuple[str, dict[str, Any]]], now_s: list[float]
) -> None:
    teller = Teller(lambda name, **event: sent.append((name, event)))
    for duration in (0.25, 0.5):
        teller.note(report(duration=duration))
        now_s[0] += MOST_DELAY_S / 2
    assert sent == []
    teller.send("runtest_protocol_complete", item_index=3)
    together = ("passed", {"reports": [("a", "call", 0.25), ("a", "call", 0.5)]})
    assert sent == [together, ("runtest_protocol_complete", {"item_index": 3})]
    now_s[0] += MOST_DELAY_S + 0.01
    teller.note(report())
    assert sent[2:] == [("passed", {"reports": [("a", "call", 0.0)]})]
    teller.send("workerfinished")
    assert sent[3:] == [("workerfinished", {})]


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({}, True),
        ({"when": "teardown"}, True),
        ({"outcome": "failed"}, False),
        ({"outcome": "skipped"}, False),
        ({"sections": [("Captured log setup", "late")]}, False),
        ({"user_properties": [("a", 1)]}, False),
        ({"wasxfail": "why"}, False),
    ],
)
def test_what_may_be_told_in_short(fields: dict[str, Any], plain: bool) -> None:
    assert is_plain(report(**fields)) is plain


@pytest.mark.parametrize(
    ("when", "duration", "shown"),
    [
        ("call", 0.0, True),
        ("setup", SHOWN_S / 2, False),
        ("teardown", SHOWN_S / 2, False),
        ("setup", SHOWN_S, True),
        ("teardown", SHOWN_S, True),
    ],
)
def test_what_is_shown(when: str, duration: float, shown: bool) -> None:
    assert is_shown(report(when=when, duration=duration)) is shown
