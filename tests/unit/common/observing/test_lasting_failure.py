"""When a failure that lasts is logged."""

from __future__ import annotations

from common.observing.lasting_failure import SECONDS_PER_WARNING, LastingFailure
from tests.support.clocks.manual_clock import ManualClock


def test_it_is_news_at_first_and_once_a_minute_while_it_lasts() -> None:
    clock = ManualClock()
    failing = LastingFailure(clock)
    assert [failing.is_news() for _ in range(3)] == [True, False, False]
    clock.advance(SECONDS_PER_WARNING - 1)
    assert not failing.is_news()
    clock.advance(1)
    assert [failing.is_news(), failing.is_news()] == [True, False]
    assert failing.num == 6


def test_after_its_end_the_next_one_is_news() -> None:
    failing = LastingFailure(ManualClock())
    assert failing.end() == 0
    failing.is_news()
    failing.is_news()
    assert (failing.end(), failing.num) == (2, 0)
    assert failing.is_news()
