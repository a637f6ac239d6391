"""A sender with many decode nodes: what one of them does costs nothing for the others."""

from __future__ import annotations

import random

import pytest

from kv_transfer.core import frames
from kv_transfer.core.deadlines import Deadlines
from kv_transfer.core.limits import WINDOWS_PER_NODE
from kv_transfer.core.sender import Sender
from tests.unit.kv_transfer.lines_run import lines_run
from tests.unit.kv_transfer.test_kv_windows import (
    LIMITS,
    PAIR_BYTES,
    connected,
    peer,
    push,
    sent_to,
)


def cost_of_an_acknowledgement(num_links: int, *, are_others_waiting: bool) -> int:
    sender = connected(num_links)
    push(sender, 0)
    if are_others_waiting:
        for number in range(1, num_links):
            push(sender, number)
    return lines_run(lambda: sender.on_frame(peer(0), frames.Ack(1), 0.1))


@pytest.mark.parametrize("are_others_waiting", [False, True])
def test_an_acknowledgement_costs_the_same_with_many_links(are_others_waiting: bool) -> None:
    few = cost_of_an_acknowledgement(8, are_others_waiting=are_others_waiting)
    many = cost_of_an_acknowledgement(800, are_others_waiting=are_others_waiting)
    assert many <= 1.2 * few


def test_a_turn_of_the_thread_without_anything_due_costs_the_same_with_many_links() -> None:
    few, many = connected(8), connected(800)

    def turn(sender: Sender) -> int:
        return lines_run(lambda: (sender.on_tick(0.1), sender.next_deadline_s()))

    turn(few), turn(many)
    assert turn(many) <= 1.2 * turn(few)


def test_links_that_wait_for_the_shared_window_are_served_in_order() -> None:
    """Each has one frame in flight, and gets another one when it is its turn."""
    num_links = WINDOWS_PER_NODE + 6
    sender = connected(num_links)
    for number in range(num_links):
        push(sender, number)
    waiting = list(range(WINDOWS_PER_NODE, num_links))
    # Link 0 gives back what is over the limit, and then room for one more each time.
    sender.on_abort(0)
    served: list[int] = []
    for number in (0, 1, 2):
        if number:
            sender.on_abort(number)
        served += sent_to(sender.on_frame(peer(number), frames.Ack(4), 0.1))
    assert served[0] == waiting[0]
    assert len(served) == 3 * 4 - 6
    assert sum(sender.in_flight_bytes.values()) == LIMITS.node_window_bytes


def test_a_link_that_is_lost_leaves_its_room_to_those_who_wait() -> None:
    sender = connected(WINDOWS_PER_NODE + 1)
    for number in range(WINDOWS_PER_NODE + 1):
        push(sender, number)
    sender.on_link_lost(peer(0), 0.1)
    # One frame is over the limit, which link 0 leaves; the room is taken with the next answer.
    assert sent_to(sender.on_frame(peer(4), frames.Ack(1), 0.1)) == [4, 4, 4, 4]
    assert sum(sender.in_flight_bytes.values()) == LIMITS.node_window_bytes


def test_the_shared_window_is_the_sum_whatever_happens_to_links() -> None:
    rng = random.Random("links")
    sender = connected(9)
    now_s = 0.0
    for _ in range(400):
        number = rng.randrange(9)
        sent = sender.in_flight_bytes.get(peer(number), 0) // PAIR_BYTES
        match rng.randrange(4):
            case 0:
                sender.on_push(number, rng.randrange(4), [rng.randrange(30)], [0])
            case 1:
                sender.on_frame(peer(number), frames.Pong(), now_s)
            case 2 if sent:
                link = sender._links.get(peer(number))
                assert link is not None
                done = link._next_seq - len(link._in_flight)
                sender.on_frame(peer(number), frames.Ack(done + rng.randint(1, sent)), now_s)
            case 3 if rng.random() < 0.1:
                sender.on_link_lost(peer(number), now_s)
        in_flight = sum(sender.in_flight_bytes.values())
        assert sender._links._window.in_flight_bytes == in_flight


def test_the_earliest_time_comes_first_and_later_ones_do_not_replace_it() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for key, at_s in (("a", 5.0), ("b", 3.0), ("a", 2.0), ("a", 9.0), ("c", 4.0)):
        deadlines.set_no_later(key, at_s)
    deadlines.discard("c")
    assert deadlines.next_s() == 2.0
    assert deadlines.take_due(1.9) == []
    assert deadlines.take_due(3.0) == ["a", "b"]
    assert deadlines.take_due(100.0) == []
    assert deadlines.next_s() is None
    deadlines.set_no_later("a", 7.0)
    assert deadlines.next_s() == 7.0
