"""The order of the queue: priority where it counts, arrival, and what a preemption does to it."""

from __future__ import annotations

import pytest

from engine.core.sequences.sequence import Sequence
from engine.core.sequences.waiting_queue import WaitingQueue
from tests.support.engine.build import make_request


def new(sequence_id: int, *, length: int = 3, priority: int = 0) -> Sequence:
    return Sequence(sequence_id, make_request(length, priority=priority))


def queue_of(*sequences: Sequence, priorities: bool = False, at_tail: bool = False) -> WaitingQueue:
    queue = WaitingQueue(has_priorities=priorities, requeues_at_tail=at_tail)
    for sequence in sequences:
        queue.join(sequence)
    return queue


def ids(queue: WaitingQueue) -> list[int]:
    assert len(queue) == len(list(queue))
    assert queue.num_tokens == sum(s.num_known for s in queue)
    return [s.sequence_id for s in queue]


@pytest.mark.covers("S41")
def test_by_arrival() -> None:
    queue = queue_of(new(1), new(3, length=9), new(2, priority=5))
    assert ids(queue) == [1, 2, 3]
    assert queue.num_tokens == 15
    assert ids(queue_of()) == []


@pytest.mark.covers("S41")
def test_by_priority_then_arrival_where_priorities_count() -> None:
    queue = queue_of(
        new(1), new(2, priority=-1), new(3, priority=7), new(4), new(5, priority=7), priorities=True
    )
    assert ids(queue) == [3, 5, 1, 4, 2]


def test_those_of_the_same_priority_wait_before_a_new_one() -> None:
    waiting = [new(1), new(2, length=5, priority=2), new(3, length=9, priority=7)]
    queue = queue_of(*waiting, priorities=True)
    assert [queue.ahead(priority) for priority in (-1, 0, 2, 5, 7, 8)] == [
        (3, 17), (3, 17), (2, 14), (1, 9), (1, 9), (0, 0)
    ]  # fmt: skip
    assert queue_of(*waiting).ahead(8) == (3, 17)


def test_a_new_one_is_told_how_many_wait_before_it() -> None:
    queue = queue_of(new(2), new(4, priority=1), priorities=True)
    assert [queue.join(new(5)), queue.join(new(3)), queue.join(new(6, priority=1))] == [2, 2, 1]


@pytest.mark.covers("S41")
def test_a_victim_keeps_its_place_by_arrival() -> None:
    queue = queue_of(new(2), new(4))
    queue.rejoin(new(3))
    queue.rejoin(new(1))
    assert ids(queue) == [1, 2, 3, 4]


@pytest.mark.covers("S41")
def test_a_victim_at_the_tail_goes_after_all_that_wait_and_before_later_ones() -> None:
    queue = queue_of(new(2), new(4), at_tail=True)
    queue.rejoin(new(3))
    queue.rejoin(new(1))
    queue.join(new(5))
    queue.rejoin(new(0))
    assert ids(queue) == [2, 4, 3, 1, 5, 0]


def test_a_victim_goes_behind_the_latest_whatever_order_they_came_in() -> None:
    queue = queue_of(new(4), new(2), at_tail=True)
    queue.rejoin(new(1))
    assert ids(queue) == [2, 4, 1]


def test_each_of_two_victims_has_a_place_of_its_own() -> None:
    first, second = new(1), new(2)
    queue = queue_of(new(3), at_tail=True)
    queue.rejoin(first)
    queue.rejoin(second)
    assert first.queue_key < second.queue_key
    queue.leave(second)
    assert ids(queue) == [3, 1]


@pytest.mark.covers("F144")
def test_a_victim_keeps_its_priority_in_either_case() -> None:
    for at_tail in (False, True):
        queue = queue_of(new(2), new(4, priority=1), priorities=True, at_tail=at_tail)
        queue.rejoin(new(1, priority=1))
        assert ids(queue) == ([4, 1, 2] if at_tail else [1, 4, 2])


def test_seated_ones_leave_the_queue_and_the_rest_keeps_its_order() -> None:
    sequences = [new(i) for i in range(1, 7)]
    queue = queue_of(*sequences)
    taken = queue.take({2, 4})
    assert taken == {2: sequences[1], 4: sequences[3]}
    assert ids(queue) == [1, 3, 5, 6]
    assert queue.take(set()) == {}
    assert len(queue.take({1, 3, 5, 6})) == 4
    assert ids(queue) == []


def test_a_sequence_that_ends_while_it_waits_leaves_the_queue() -> None:
    one, two, three = (new(i) for i in (1, 2, 3))
    queue = queue_of(one, two, three)
    queue.leave(two)
    assert ids(queue) == [1, 3]
    assert (one in queue, two in queue) == (True, False)
    assert object() not in queue
    with pytest.raises(ValueError, match="sequence 2 does not wait"):
        queue.leave(two)
    with pytest.raises(ValueError, match="sequence 4 does not wait"):
        queue.leave(new(4))


def test_two_with_one_place_are_two() -> None:
    one, twin = new(1), new(1)
    queue = queue_of(one)
    assert twin not in queue
    with pytest.raises(ValueError, match="does not wait"):
        queue.leave(twin)


# --- passes ---------------------------------------------------------------------------------------


def aging(*sequences: Sequence, limit: int) -> WaitingQueue:
    queue = WaitingQueue(has_priorities=True, requeues_at_tail=False, pass_limit=limit)
    for sequence in sequences:
        queue.join(sequence)
    return queue


@pytest.mark.covers("S41")
def test_the_oldest_goes_first_when_enough_were_admitted_before_it() -> None:
    queue = aging(new(1), new(2, priority=-1), new(3), limit=2)
    for sequence_id in (4, 5):
        queue.join(new(sequence_id, priority=1))
        assert ids(queue)[0] == sequence_id
        queue.take({sequence_id})
    queue.join(new(6, priority=1000))
    assert ids(queue) == [1, 6, 3, 2]
    # The next one ages from 0.
    queue.take({1})
    assert ids(queue) == [6, 3, 2]
    queue.take({6})
    assert ids(queue) == [3, 2]
    queue.take({3})
    queue.join(new(7))
    assert ids(queue) == [2, 7]
    queue.take({2, 7})
    assert ids(queue) == []


def test_only_later_ones_pass_and_one_that_returns_ages_anew() -> None:
    first, second = new(1), new(2, priority=1)
    queue = aging(second, new(3), limit=2)
    queue.take({2})
    queue.rejoin(first)
    queue.join(new(4, priority=1))
    # What left before the first one joined did not pass it.
    assert ids(queue) == [4, 1, 3]
    queue.take({4})
    queue.take({3})
    queue.join(new(5, priority=1))
    assert ids(queue) == [1, 5]
    queue.take({1})
    queue.rejoin(first)
    assert ids(queue) == [5, 1]
    queue.take({5})
    queue.take({1})
    queue.rejoin(first)
    queue.join(new(6, priority=1))
    queue.take({6})
    queue.join(new(7, priority=1))
    assert ids(queue) == [7, 1]


def test_one_that_leaves_takes_its_age_with_it() -> None:
    old, other = new(1), new(2)
    queue = aging(old, other, new(3, priority=1), limit=1)
    queue.take({3})
    assert ids(queue) == [1, 2]
    queue.leave(old)
    queue.join(new(4, priority=1))
    assert ids(queue) == [4, 2]


def test_cached_tokens_are_counted_as_long_as_their_sequences_wait() -> None:
    queue = queue_of(new(1, length=9))
    queue.join(new(2, length=9), 8)
    queue.join(third := new(3, length=9), 4)
    assert (queue.num_tokens, queue.num_found_tokens) == (27, 12)
    victim = queue.take({1, 2})[2]
    assert (queue.num_tokens, queue.num_found_tokens) == (9, 4)
    queue.rejoin(victim)
    assert (queue.num_tokens, queue.num_found_tokens) == (18, 4), "its blocks are given away"
    queue.leave(third)
    queue.leave(victim)
    assert (queue.num_tokens, queue.num_found_tokens) == (0, 0)
