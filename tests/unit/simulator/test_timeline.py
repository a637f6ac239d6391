"""Events come in the order of their times, and at one moment in the order in which they were added,
those that are last after all others."""

from __future__ import annotations

from functools import partial

import pytest

from simulator.timeline import Timeline


def test_events_come_in_the_order_of_their_times_and_of_their_adding() -> None:
    timeline, log = Timeline(), list[tuple[str, float]]()

    def note(name: str) -> None:
        log.append((name, timeline.now_s()))

    timeline.at(2.0, partial(note, "turn"), last=True)
    timeline.at(2.0, partial(note, "first"))
    timeline.at(1.0, lambda: timeline.after(1.0, partial(note, "second")))
    timeline.at(0.5, partial(note, "early"))
    timeline.run()
    assert log == [("early", 0.5), ("first", 2.0), ("second", 2.0), ("turn", 2.0)]
    assert timeline.num_handled == 5


def test_a_run_ends_when_it_is_told_and_goes_on_from_there() -> None:
    timeline, log = Timeline(), list[float]()
    for at_s in (1.0, 2.0, 3.0):
        timeline.at(at_s, lambda: log.append(timeline.now_s()))
    timeline.run(until=lambda: len(log) == 2)
    assert (log, timeline.now_s()) == ([1.0, 2.0], 2.0)
    timeline.run()
    assert log == [1.0, 2.0, 3.0]


def test_an_event_can_end_the_run_and_the_next_run_goes_on() -> None:
    timeline, log = Timeline(), list[str]()
    timeline.at(1.0, timeline.stop)
    timeline.at(1.0, lambda: log.append("same moment"))
    asked: list[float] = []

    def until() -> bool:
        asked.append(timeline.now_s())
        return False

    timeline.run(until)
    assert (log, timeline.num_handled, asked) == ([], 1, [1.0]), "asked after the last event too"
    timeline.run()
    assert (log, timeline.num_handled) == (["same moment"], 2)


def test_time_does_not_go_back() -> None:
    timeline = Timeline()
    timeline.at(1.0, lambda: None)
    timeline.run()
    with pytest.raises(ValueError, match=r"an event at 0.5 s, and it is 1.0 s"):
        timeline.at(0.5, lambda: None)
