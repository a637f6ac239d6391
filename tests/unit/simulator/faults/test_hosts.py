"""A process's clock, the paths between hosts, and the store's leases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.errors import PlacementUnavailable
from common.ids import Incarnation
from common.nodes import NodeLoad, Role
from simulator.faults.drawing import Wishes, draw_history
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.node.faulty_node import nature_of
from simulator.faults.store.leases import Leases
from simulator.timeline import Timeline

SHAPE = draw_history(1, Wishes(kinds=(), num_requests=1)).shape


def noting(happened: list[tuple[str, float]], what: str, timeline: Timeline) -> Callable[[], None]:
    return lambda: happened.append((what, timeline.now_s()))


def test_a_frozen_process_does_everything_when_it_goes_on_and_in_order() -> None:
    timeline, happened = Timeline(), list[tuple[str, float]]()
    clock = ProcessClock(timeline)
    clock.after(1.0, noting(happened, "early", timeline))
    timeline.at(2.0, clock.freeze)
    clock.at(3.0, noting(happened, "held", timeline))
    clock.after(4.0, noting(happened, "later", timeline))
    timeline.at(5.0, clock.thaw)
    clock.after(6.0, noting(happened, "after", timeline))
    timeline.run()
    assert happened == [("early", 1.0), ("held", 5.0), ("later", 5.0), ("after", 6.0)]


def test_in_a_dead_process_nothing_happens() -> None:
    timeline, happened = Timeline(), list[tuple[str, float]]()
    clock = ProcessClock(timeline)
    clock.after(1.0, noting(happened, "never", timeline))
    clock.freeze()
    clock.run(noting(happened, "held", timeline))
    clock.kill()
    clock.thaw()
    timeline.run()
    assert not happened
    assert not clock.is_running


def test_a_clock_that_jumped_is_ahead_and_what_is_due_is_due_now() -> None:
    timeline, happened = Timeline(), list[tuple[str, float]]()
    clock = ProcessClock(timeline)
    clock.jump(5.0)
    assert clock.now_s() == 5.0
    clock.at(3.0, noting(happened, "overdue", timeline))
    clock.at(7.0, noting(happened, "due", timeline))
    timeline.run()
    assert happened == [("overdue", 0.0), ("due", 2.0)]


def test_a_way_that_was_cut_twice_is_mended_twice() -> None:
    paths = Paths()
    paths.cut("a", "b")
    paths.cut("a", "b")
    assert not paths.is_open("a", "b")
    assert paths.is_open("b", "a")
    paths.mend("a", "b")
    assert not paths.is_open("a", "b")
    paths.mend("a", "b")
    assert paths.is_open("a", "b")


def test_leases_expire_are_fenced_by_epochs_and_outlive_an_emptied_store() -> None:
    leases = Leases(lease_s=4.0)
    nature = nature_of(SHAPE, Role.DECODE)
    first = nature.record_of(Incarnation("d", leases.next_epoch()))
    second = nature.record_of(Incarnation("d", leases.next_epoch()))
    load = NodeLoad(num_running=0, num_waiting=0, queued_tokens=0, free_blocks=1, free_seats=1)
    assert leases.heartbeat(first, load, 0.0)
    assert leases.heartbeat(second, load, 1.0)
    assert not leases.heartbeat(first, load, 2.0)
    assert [one.record.epoch for one in leases.live_nodes(4.9)] == [2]
    leases.leave(first.incarnation)
    assert leases.live_nodes(4.9)
    assert not leases.live_nodes(5.0)
    leases.heartbeat(second, load, 6.0)
    leases.ahead_s = 4.0
    assert not leases.live_nodes(6.0)
    leases.heartbeat(second, load, 6.0)
    assert leases.live_nodes(6.0)
    leases.empty()
    assert not leases.live_nodes(6.0)
    assert leases.next_epoch() == 3


def test_a_store_that_is_away_answers_nothing() -> None:
    leases = Leases(lease_s=4.0)
    leases.is_away = True
    for call in (leases.next_epoch, lambda: leases.live_nodes(0.0)):
        with pytest.raises(PlacementUnavailable):
            call()
    leases.leave(Incarnation("d", 1))
