"""Flows share ports: literal times for flows that come, go and get more."""

from __future__ import annotations

import math

import pytest

from simulator.shared_links import SharedLinks


def test_one_flow_has_the_port_to_itself() -> None:
    links = SharedLinks(100.0)
    assert links.next_end_s() == math.inf
    links.add(1, "p", "d", 250.0, 1.0)
    assert links.next_end_s() == pytest.approx(3.5)
    assert (links.take_ended(3.0), len(links)) == ([], 1)
    assert (links.take_ended(3.5), len(links)) == ([1], 0)


def test_flows_share_the_port_that_they_have_in_common() -> None:
    links = SharedLinks(100.0)
    links.add(1, "p", "d", 100.0, 0.0)
    links.add(2, "p", "e", 150.0, 0.0)
    links.add(3, "q", "f", 100.0, 0.0)  # shares nothing
    assert links.take_ended(1.0) == [3]
    assert links.next_end_s() == pytest.approx(2.0)
    assert links.take_ended(2.0) == [1]
    # 50 bytes of the second are left, and it has the whole port now.
    assert links.next_end_s() == pytest.approx(2.5)


def test_the_slower_end_decides() -> None:
    links = SharedLinks(90.0)
    for flow, source in enumerate("pqr"):
        links.add(flow, source, "d", 30.0, 0.0)
    assert links.next_end_s() == pytest.approx(1.0)
    assert links.take_ended(1.0) == [0, 1, 2]


def test_more_bytes_go_behind_those_that_are_left_and_a_dropped_flow_makes_room() -> None:
    links = SharedLinks(100.0)
    links.add(1, "p", "d", 100.0, 0.0)
    links.add(1, "p", "d", 100.0, 0.5)
    links.add(2, "p", "d", 1000.0, 0.5)
    assert links.next_end_s() == pytest.approx(0.5 + 150 / 50)
    links.drop(2, 1.5)
    assert links.next_end_s() == pytest.approx(1.5 + 100 / 100)
    links.drop(2, 1.5)
    assert links.take_ended(2.5) == [1]


def test_flows_that_ended_one_after_the_other_are_taken_together() -> None:
    seen, unseen = SharedLinks(100.0), SharedLinks(100.0)
    for links in (seen, unseen):
        for flow, num_bytes in enumerate((30.0, 70.0, 110.0)):
            links.add(flow, "p", "d", num_bytes, 0.0)
    assert [seen.take_ended(at_s) for at_s in (1.0, 1.8, 2.0)] == [[0], [1], []]
    assert (unseen.take_ended(2.0), unseen.next_end_s()) == ([0, 1], seen.next_end_s())
    assert unseen.next_end_s() == pytest.approx(2.1)


@pytest.mark.parametrize("rate", [11e9, 4e11])
@pytest.mark.parametrize("at_s", [0.0, 1e5, 1.7e9])
def test_flows_end_at_any_time_of_day(at_s: float, rate: float) -> None:
    links = SharedLinks(rate)
    for flow in range(3):
        links.add(flow, flow, "d", 1e9 + flow, at_s)
    ended: list[int] = []
    while (next_s := links.next_end_s()) < math.inf:
        taken = links.take_ended(next_s)
        assert taken, "a flow whose end has come does not end"
        ended += taken
    assert ended == [0, 1, 2]
