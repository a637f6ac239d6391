"""Which turns of a node are standstills, and what is left of a time without them."""

from __future__ import annotations

import pytest

from node.flow.attempts.standstills import Standstills


def seen(*spans_s: float, is_busy: bool = True) -> tuple[Standstills, float]:
    """Look at turns of these lengths from 100 s on; return the time of the last look too."""
    standstills, now_s = Standstills(), 100.0
    standstills.look(now_s, is_busy=is_busy)
    for span_s in spans_s:
        now_s += span_s
        standstills.look(now_s, is_busy=is_busy)
    return standstills, now_s


@pytest.mark.parametrize("turn_s", [0.01, 0.5, 1.0])
def test_usual_turns_count_whole(turn_s: float) -> None:
    standstills, now_s = seen(*[turn_s] * 20)
    assert standstills.span_s(100.0, now_s) == pytest.approx(20 * turn_s)


def test_a_turn_far_longer_than_usual_counts_as_the_longest_that_may_be_usual() -> None:
    standstills, now_s = seen(*[0.5] * 20, 60.0, *[0.5] * 4)
    assert standstills.span_s(100.0, now_s) == pytest.approx(10.0 + 5.0 + 2.0, abs=0.1)
    assert standstills.span_s(now_s - 2.0, now_s) == pytest.approx(2.0)


def test_a_short_turn_is_never_a_standstill() -> None:
    standstills, now_s = seen(*[0.001] * 20, 1.0)
    assert standstills.span_s(100.0, now_s) == pytest.approx(1.02)


def test_turns_that_have_become_long_are_soon_usual() -> None:
    """As when prompts are long on a slow machine: three of them are cut at most."""
    standstills, now_s = seen(*[8.0] * 20)
    assert standstills.span_s(now_s - 17 * 8.0, now_s) == pytest.approx(17 * 8.0)


def test_an_idle_time_is_no_turn() -> None:
    standstills, now_s = seen(3600.0, 3600.0, is_busy=False)
    assert standstills.span_s(100.0, now_s) == 7200.0


def test_of_a_standstill_only_the_part_within_a_time_is_left_out_of_it() -> None:
    standstills, now_s = seen(0.1, 60.0)
    assert standstills.span_s(now_s - 5.0, now_s) == pytest.approx(0.0)
    assert standstills.span_s(100.0, now_s) == pytest.approx(1.1)


def test_what_is_kept_is_bounded_and_the_latest() -> None:
    standstills = Standstills()
    for number in range(1000):
        # Each begins anew behind short turns.
        for turn in range(20):
            standstills.look(1000.0 * number + 0.01 * turn, is_busy=True)
        standstills.look(1000.0 * number + 500.0, is_busy=False)
    assert standstills.span_s(999_000.0, 999_500.0) == pytest.approx(1.19, abs=0.01)
    left_out_s = 999_500.0 - standstills.span_s(0.0, 999_500.0)
    assert left_out_s == pytest.approx(16 * 498.8, rel=0.01)
