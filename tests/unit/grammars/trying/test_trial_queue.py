"""Clients take turns, and long trials make room for others."""

from __future__ import annotations

import pytest

from common.errors import Overloaded
from grammars.trying import queue as queue_module
from grammars.trying.queue import MAX_SLOTS, MAX_STOPS, TrialQueue


def started(queue: TrialQueue) -> list[int]:
    found = []
    while (trial := queue.next_to_start()) is not None:
        found.append(trial)
    return found


def age(queue: TrialQueue, *trials: int) -> None:
    for trial in trials:
        queue.age(trial)


def test_clients_take_turns() -> None:
    queue = TrialQueue()
    for trial in range(6):
        queue.add(trial, "greedy")
    queue.add(6, "other")
    queue.add(7, "third")
    assert started(queue) == [0, 6, 7]
    for trial in (0, 6, 7):
        queue.remove(trial)
    assert started(queue) == [1, 2]


def test_a_client_that_had_a_turn_is_behind_those_who_wait() -> None:
    queue = TrialQueue()
    for trial, client in enumerate(("first", "first", "second", "third")):
        queue.add(trial, client)
    for trial in (0, 2, 3, 1):
        assert queue.next_to_start() == trial
        queue.remove(trial)  # so that all have as few slots


def test_a_client_leaves_a_slot_to_the_next_one() -> None:
    queue = TrialQueue()
    for trial in range(3):
        queue.add(trial, "greedy")
    assert started(queue) == [0, 1]
    assert queue.next_to_stop() is None, "its own are young"
    queue.add(3, "late")
    assert started(queue) == [3]


def test_a_young_trial_is_left_alone_and_an_old_one_makes_room_for_waiting_ones() -> None:
    queue = TrialQueue()
    for trial, client in enumerate(("greedy", "greedy", "late")):
        queue.add(trial, client)
    assert started(queue) == [0, 2, 1]
    queue.add(3, "third")
    assert queue.next_to_stop() is None, "all are young"
    age(queue, 0, 2)
    assert queue.next_to_stop() == 0, "its client has more slots"
    assert started(queue) == [3]
    age(queue, 1)
    assert queue.next_to_stop() is None, "nobody waits"
    queue.add(4, "late")
    assert queue.next_to_stop() is None, "no client has more than it"
    age(queue, 3)
    assert queue.next_to_stop() == 3, "all are old, and it began last"
    assert started(queue) == [4]


def test_a_client_that_waits_for_its_own_old_trials_gets_the_slot_of_one() -> None:
    queue = TrialQueue()
    for trial in range(3):
        queue.add(trial, "greedy")
    age(queue, started(queue)[0])
    assert queue.next_to_stop() is None, "one of them is young"
    age(queue, 1)
    assert queue.next_to_stop() == 1
    assert started(queue) == [2]


def test_the_client_with_fewer_slots_is_next() -> None:
    queue = TrialQueue()
    for trial in range(4):
        queue.add(trial, "greedy")
    queue.add(9, "other")
    assert started(queue) == [0, 9, 1]
    queue.remove(9)
    queue.add(10, "other")
    assert started(queue) == [10]


def test_what_made_room_is_tried_behind_all_others_and_leaves_a_slot() -> None:
    queue = TrialQueue()
    for trial in range(4):
        queue.add(trial, "one")
    for newest in (1, 2):
        age(queue, *started(queue))
        assert queue.next_to_stop() == newest
    assert started(queue) == [3]
    queue.remove(3)
    assert started(queue) == [1], "the last slot is for those that were never tried"
    queue.add(4, "two")
    assert started(queue) == [4]
    queue.remove(4)
    queue.remove(0)
    assert started(queue) == [2]
    queue.add(5, "one")
    assert queue.next_to_stop() is None, "what is tried again is young again"


def test_one_that_made_room_too_often_is_given_up() -> None:
    queue, hostile = TrialQueue(), 50
    for trial in range(MAX_SLOTS - 1):
        queue.add(trial, f"client {trial}")
    queue.add(hostile, "one")
    age(queue, *started(queue))
    for number in range(MAX_STOPS):
        queue.add(100, "new")
        assert queue.next_to_stop() == hostile, "none that began later is old"
        assert queue.is_given_up(hostile) is (number == MAX_STOPS - 1)
        assert started(queue) == [100]
        queue.remove(100)
        queue.remove(0)
        assert started(queue) == [hostile]
        queue.remove(1)
        for trial in range(MAX_SLOTS - 1):
            queue.add(trial, f"client {trial}")
        assert started(queue) == [0, 1]
        age(queue, hostile)  # Those that began after it are young: it makes room again.


def test_what_nobody_waits_for_is_forgotten() -> None:
    queue = TrialQueue()
    for trial in range(5):
        queue.add(trial, "one")
    age(queue, *started(queue))
    assert queue.next_to_stop() is not None
    for trial in (*range(5), 99):
        queue.remove(trial)
    assert started(queue) == []
    assert queue == TrialQueue()


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_WAITING", 2)
    queue = TrialQueue()
    for trial in range(3):
        queue.add(trial, f"client {trial}")
        assert started(queue) == [trial]
    for trial in range(3, 5):
        queue.add(trial, "one")
    with pytest.raises(Overloaded, match="2 grammars wait"):
        queue.add(5, "other")
