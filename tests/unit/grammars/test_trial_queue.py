"""Clients take turns, and long trials make room for others."""

from __future__ import annotations

import pytest

from common.errors import Overloaded
from grammars import trial_queue
from grammars.trial_queue import MAX_SLOTS, MAX_STOPS, YOUNG_S, TrialQueue


def started(queue: TrialQueue, now_s: float) -> list[int]:
    found = []
    while (trial := queue.next_to_start(now_s)) is not None:
        found.append(trial)
    return found


def test_clients_take_turns() -> None:
    queue = TrialQueue()
    for trial in range(6):
        queue.add(trial, "greedy")
    queue.add(6, "other")
    queue.add(7, "third")
    assert started(queue, 0.0) == [0, 6, 7]
    for trial in (0, 6, 7):
        queue.remove(trial)
    assert started(queue, 0.0) == [1, 2, 3]


def test_a_young_trial_is_left_alone_and_an_old_one_makes_room_for_who_waits() -> None:
    queue = TrialQueue()
    for trial in range(3):
        queue.add(trial, "greedy" if trial else "other")
    assert started(queue, 0.0) == [0, 1, 2]
    assert queue.next_to_stop(99.0) is None, "nobody waits"
    queue.add(3, "late")
    assert queue.next_to_stop(YOUNG_S / 2) is None
    assert queue.wait_s(YOUNG_S / 2) == pytest.approx(YOUNG_S / 2)
    stopped = queue.next_to_stop(YOUNG_S)
    assert stopped in (1, 2), "one of the client that has two"
    assert started(queue, YOUNG_S) == [3]
    assert queue.next_to_stop(99.0) is None


def test_what_made_room_is_tried_behind_all_others_and_leaves_a_slot() -> None:
    queue = TrialQueue()
    for trial in range(4):
        queue.add(trial, "one")
    assert started(queue, 0.0) == [0, 1, 2]
    stopped = queue.next_to_stop(1.0)
    assert stopped is not None
    assert started(queue, 1.0) == [3]
    queue.remove(3)
    assert started(queue, 2.0) == [], "the last slot is for those that were never tried"
    queue.add(4, "one")
    assert started(queue, 2.0) == [4]
    queue.remove(4)
    queue.remove(next(one for one in (0, 1, 2) if one != stopped))
    assert started(queue, 3.0) == [stopped]


def test_one_that_made_room_too_often_is_given_up() -> None:
    queue, now_s, hostile = TrialQueue(), 1.0, 50
    for trial in range(MAX_SLOTS - 1):
        queue.add(trial, f"client {trial}")
    started(queue, 0.0)
    queue.add(hostile, "one")
    assert started(queue, now_s) == [hostile]
    for number in range(MAX_STOPS):
        queue.add(100 + number, "new")
        now_s += 1.0
        assert queue.next_to_stop(now_s) == hostile, "it began last"
        assert queue.is_given_up(hostile) is (number == MAX_STOPS - 1)
        assert started(queue, now_s) == [100 + number]
        queue.remove(100 + number)
        queue.remove(1)
        assert started(queue, now_s) == [hostile]
        queue.add(1, "client 1")
        assert started(queue, now_s - 0.5) == [1]


def test_what_nobody_waits_for_is_forgotten() -> None:
    queue = TrialQueue()
    for trial in range(5):
        queue.add(trial, "one")
    started(queue, 0.0)
    stopped = queue.next_to_stop(1.0)
    assert stopped is not None
    for trial in (*range(5), 99):
        queue.remove(trial)
    assert started(queue, 9.0) == []
    assert queue == TrialQueue()


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_queue, "MAX_WAITING", 2)
    queue = TrialQueue()
    for trial in range(3):
        queue.add(trial, "one")
        started(queue, 0.0)
    for trial in range(3, 5):
        queue.add(trial, "one")
    with pytest.raises(Overloaded, match="2 grammars wait"):
        queue.add(5, "other")
