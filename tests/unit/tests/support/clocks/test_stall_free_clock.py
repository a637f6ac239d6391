"""Time without stalls: what a stopped process could not have seen is no time."""

from __future__ import annotations

import time

import pytest

from tests.support.clocks.stall_free_clock import LONGEST_LOOK_S, StallFreeClock, timed


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


def test_a_gap_between_two_readings_counts_up_to_the_most(now_s: list[float]) -> None:
    clock = StallFreeClock(0.5)
    now_s[0] += 0.25
    assert clock.now_s() == 0.25
    now_s[0] += 10.0
    assert clock.now_s() == 0.75
    assert clock.now_s() == 0.75


def test_a_call_in_a_stall_took_one_look(now_s: list[float]) -> None:
    def stall() -> str:
        now_s[0] += 10.0
        return "done"

    assert timed(stall) == ("done", LONGEST_LOOK_S)


def test_an_error_of_the_call_is_raised() -> None:
    def fail() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        timed(fail)
